//! Tests of the checks of kernels, and of what is read from PTX.

use super::*;
use cuda_builder::{Callee, Resources};

const MODULE: &str = "\
//
.version 8.6
.target sm_90
.address_size 64

.visible .entry sum_f32(
	.param .u64 sum_f32_param_0
)
.maxntid 256, 1, 1
{
	{ // callseq
	}
	ret;
}
	// .globl	sum_f16
.visible .entry sum_f16(
	.param .u64 sum_f16_param_0
)
{
	ret;
}
";

fn report(registers: u32) -> KernelReport {
    let resources = Resources { registers, ..Resources::default() };
    KernelReport {
        name: "sum_f32".to_owned(),
        file: "sum".to_owned(),
        resources: Some(resources),
        max_threads: Some(resources.max_threads()),
        own_stack: 0,
        calls: 0,
        callees: Vec::new(),
        call_prototypes: 0,
    }
}

#[test]
fn a_kernel_is_cut_out_of_its_module_whole() {
    let text = body(MODULE, "sum_f32").unwrap();
    assert!(text.starts_with(".visible .entry sum_f32(") && text.ends_with("\tret;\n}\n"));
    assert!(!text.contains("sum_f16"));
    assert_eq!(body(MODULE, "sum"), None);
    assert_eq!(head(MODULE), ".version 8.6\n.target sm_90\n.address_size 64\n");
}

#[test]
fn a_panic_is_a_trap_in_cores_panicking_functions() {
    let module = "\
.visible .entry sum(
)
{
	.loc	1 7 5
	trap;
	.loc	2 62 9
	@%p1 trap;
	add.u32 	%r1, %r2, %r3;
	.loc	12 62 9
	trap;
	ret;
}
.visible .entry copy(
)
{
	ret;
}
	.file	1 \"/mine/kernels/src/sum.rs\"
	.file	2 \"/rust/library/core/src/panicking.rs\"
	.file	12 \"/mine/src/core.rs\"
";
    assert_eq!((panics(module, "sum"), panics(module, "copy")), (1, 0));
}

#[test]
fn a_kernel_may_state_its_own_bound_of_threads() {
    assert_eq!(thread_bound(&body(MODULE, "sum_f32").unwrap()), Some(256));
    assert_eq!(thread_bound(&body(MODULE, "sum_f16").unwrap()), None);
}

#[test]
fn too_many_registers_for_the_block_are_a_violation() {
    assert_eq!(check_kernel(&report(128), 512), Vec::<String>::new());
    let violations = check_kernel(&report(136), 512);
    assert!(violations[0].contains("136 registers allow 384 threads"), "{violations:?}");
    assert_eq!(check_kernel(&report(136), 256), Vec::<String>::new());
}

#[test]
fn a_kernel_does_not_fail_for_another_of_its_file_on_a_newer_architecture() {
    let stack = |name: &str, stack| {
        let resources = Some(Resources { stack, ..Resources::default() });
        KernelReport { name: name.to_owned(), resources, ..report(32) }
    };
    let all = [stack("sum_f32", 0), stack("sum_f16", 16)];
    assert_eq!(check_newer(&all, &all[..1]), Vec::<String>::new());
    let violations = check_newer(&all, &all);
    assert!(violations[0].contains("sum_f16: 16 bytes of stack"), "{violations:?}");
}

fn callee(path: &str, stack: usize) -> Callee {
    Callee { path: path.to_owned(), stack }
}

#[test]
fn calls_stack_and_spills_are_violations_each() {
    let mut broken = report(32);
    broken.callees = vec![callee("__assertfail", 0), callee("my::helper::<f32>", 0)];
    broken.resources = Some(Resources {
        registers: 32,
        stack: 16,
        spill_stores: 4,
        spill_loads: 8,
        ..Resources::default()
    });
    let violations = check_kernel(&broken, 512).join("; ");
    for part in
        ["calls __assertfail", "calls my::helper::<f32>", "16 bytes of stack", "12 bytes of spills"]
    {
        assert!(violations.contains(part), "{violations}");
    }
}

#[test]
fn a_kernel_for_gin_may_call_its_operations_with_their_descriptor() {
    let put = "nccl_device::gin::calls::put::gin_put::<nccl_device::gin::backend::Proxy>";
    let mut kernel = report(32);
    kernel.callees = vec![callee("__assertfail", 0), callee(put, 128)];
    kernel.resources = Some(Resources { registers: 32, stack: 128, ..Resources::default() });
    assert_eq!(check_kernel(&kernel, 512), Vec::<String>::new());
    assert_eq!(
        (stack(&kernel), calls(&kernel)),
        ("128, own 0".to_owned(), "__assertfail\ngin_put (stack 128)".to_owned())
    );

    kernel.own_stack = 16;
    kernel.callees[1].stack = 256;
    kernel.callees.push(callee("my::helper", 0));
    let violations = check_kernel(&kernel, 512).join("; ");
    for part in ["16 bytes of stack", "has 256 bytes of stack", "calls my::helper"] {
        assert!(violations.contains(part), "{violations}");
    }
}

#[test]
fn a_kernel_of_unknown_cost_is_not_passed() {
    let unknown = KernelReport { resources: None, max_threads: None, ..report(32) };
    assert!(check_kernel(&unknown, 512)[0].contains("without ptxas"));
}
