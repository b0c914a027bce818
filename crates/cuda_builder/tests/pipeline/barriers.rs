//! A barrier between two tests of one condition stays one barrier; other code is optimised.

use std::path::Path;

use libtest_mimic::Trial;

use crate::support::Needs::{Nccl, Nightly, RustSource};
use crate::support::{NIGHTLY, Package, TestResult, body, ensure, test};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a_barrier_between_two_tests_stays_one_barrier", &[RustSource, Nccl], || {
            stay_one("barriers", None)
        }),
        test(
            "a_barrier_between_two_tests_stays_one_barrier_on_nightly",
            &[RustSource, Nccl, Nightly],
            || stay_one("barriers_nightly", NIGHTLY.as_deref()),
        ),
        test("assembly_without_effects_may_leave_a_loop", &[RustSource], pure_assembly),
    ]
}

fn stay_one(folder: &str, rustc: Option<&Path>) -> TestResult {
    let mut builder = Package::fixture(folder).builder();
    if let Some(rustc) = rustc {
        builder = builder.rustc(rustc);
    }
    let artifacts = builder.build()?;
    let barriers = |kernel| {
        let body = body(&artifacts, kernel);
        body.matches("bar.sync").count() + body.matches("barrier.").count()
    };
    // The barriers are a call, assembly, a call through a pointer, and NCCL's coop.
    for kernel in ["barrier_call", "barrier_asm", "barrier_indirect", "barrier_coop"] {
        let found = barriers(kernel);
        ensure(found == 1, format!("{kernel} has {found} barriers in place of one"))?;
    }
    // NCCL's barrier has several: the same number as without a condition around it.
    let (alone, between) = (barriers("barrier_lsa_alone"), barriers("barrier_lsa"));
    ensure(alone > 0, "NCCL's barrier has no barrier in it")?;
    ensure(between == alone, format!("NCCL's barrier of {alone} became {between}"))
}

fn pure_assembly() -> TestResult {
    let source = "
#[unsafe(no_mangle)]
pub unsafe extern \"ptx-kernel\" fn squares(out: *mut u32, count: usize, x: u32) {
    for i in 0..count {
        let y: u32;
        unsafe {
            core::arch::asm!(\"mul.hi.u32 {y}, {x}, {x};\", y = out(reg32) y, x = in(reg32) x,
                options(pure, nomem, nostack));
            out.add(i).write_volatile(y + i as u32)
        }
    }
}
";
    let artifacts = Package::new("pure_assembly", source).builder().build()?;
    let body = body(&artifacts, "squares");
    let lines: Vec<&str> = body.lines().map(str::trim).collect();
    let place = |wanted: &str| lines.iter().position(|line| line.starts_with(wanted));
    let asm = place("mul.hi.u32").ok_or("the assembly is missing")?;
    // A loop begins at a label that a later line branches to.
    let loops = lines.iter().enumerate().filter_map(|(i, line)| {
        let label = line.split_once("bra")?.1.trim_end_matches(';').split_whitespace().last()?;
        place(&format!("{label}:")).filter(|start| *start < i)
    });
    let first = loops.min().ok_or("there is no loop")?;
    ensure(asm < first, format!("the assembly stays in the loop:\n{body}"))
}
