//! `cargo xtask ptx`: prints the kernels' PTX and resources, and checks calls, stack and registers.

use std::fs;

use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use cuda_builder::{Artifacts, CalleeKind, CudaBuilder, KernelReport, ModuleArtifact, NvvmArch};

use crate::project::{Project, root};
use crate::setup::{Optional, setup};

/// The package of the kernels.
const KERNELS: &str = "devcomm-kernels";

/// Maximum stack of a GIN operation in bytes: the size of NCCL's request descriptor.
const DESCRIPTOR: usize = 128;

/// The block size that a kernel must support, unless its PTX declares a smaller maximum
/// (`.maxntid`).
const THREADS: u32 = 512;

/// A newer architecture for which the PTX must also pass the checks.
const NEWER_ARCH: NvvmArch = NvvmArch::Compute100;

/// Builds the kernels, prints one or writes all, and prints the table. The exit code is 1 if
/// `check` finds a violation.
pub fn ptx(kernel: Option<&str>, check: bool, arch: Option<&str>) -> Result<u8> {
    let arch = arch.map_or(Ok(NvvmArch::Compute90), str::parse)?;
    setup(true, if check { Optional::Nothing } else { Optional::Ptxas })?;
    let folder = Project::open()?.target_folder().join("ptx").join(arch.name());
    let mut builder = CudaBuilder::new(KERNELS).arch(arch).manifest_dir(root()).out_dir(&folder);
    if let Some(name) = kernel {
        builder = builder.only(name);
    }
    let artifacts = builder.build()?;
    let mut reports = artifacts.report()?;
    if let Some(name) = kernel {
        reports = select(reports, name);
        print!("{}", text_of(&artifacts, &reports, name)?);
        // To standard error, so that `> kernel.ptx` gets only PTX.
        eprintln!("{}", table(&artifacts, &reports));
    } else {
        println!("{}", table(&artifacts, &reports));
        println!("\nPTX, sidecars and cubins: {}", artifacts.folder.display());
    }
    if !check {
        return Ok(0);
    }
    let violations = check_all(&artifacts, &reports)?;
    for violation in &violations {
        eprintln!("violation: {violation}");
    }
    for (place, kernels) in artifacts.checks_in_loops()? {
        let others = if kernels.len() > 1 { ", .." } else { "" };
        eprintln!("note: {place}: a check that can fail in a loop, in {}{others}", kernels[0]);
    }
    if violations.is_empty() {
        eprintln!("checked {} kernels: no violations", reports.len());
    }
    Ok(u8::from(!violations.is_empty()))
}

/// The kernel with this name, or the kernels of the file with this name.
fn select(mut reports: Vec<KernelReport>, name: &str) -> Vec<KernelReport> {
    let is_kernel = reports.iter().any(|report| report.name == name);
    reports.retain(|report| if is_kernel { report.name == name } else { report.file == name });
    reports
}

fn module_of<'a>(artifacts: &'a Artifacts, report: &KernelReport) -> Option<&'a ModuleArtifact> {
    artifacts.modules.iter().find(|module| module.file == report.file)
}

/// The PTX of one kernel, or of the file with this name.
fn text_of(artifacts: &Artifacts, reports: &[KernelReport], name: &str) -> Result<String> {
    let report = reports.first().context("no kernel is selected")?;
    let module = module_of(artifacts, report).context("the kernel has no module")?;
    let text = fs::read_to_string(&module.ptx)
        .with_context(|| format!("cannot read {}", module.ptx.display()))?;
    if report.name != name {
        return Ok(text);
    }
    let kernel = body(&text, name)
        .with_context(|| format!("no entry {name} in {}", module.ptx.display()))?;
    Ok(format!("// {name}, of {}\n{}{kernel}", module.ptx.display(), head(&text)))
}

/// The directives at the start of a module.
fn head(ptx: &str) -> String {
    let directives = [".version", ".target", ".address_size"];
    let lines = ptx.lines().filter(|line| directives.iter().any(|name| line.starts_with(name)));
    lines.map(|line| format!("{line}\n")).collect()
}

/// One entry of a module, from its directive to its closing brace.
fn body(ptx: &str, kernel: &str) -> Option<String> {
    let is_entry = |line: &&str| {
        line.split_once(".entry ").is_some_and(|(_, rest)| {
            rest.split(['(', ' ']).next().is_some_and(|name| name == kernel)
        })
    };
    let mut lines = ptx.lines().skip_while(|line| !is_entry(line)).peekable();
    lines.peek()?;
    let mut text = String::new();
    for line in lines {
        text += line;
        text.push('\n');
        if line == "}" {
            break;
        }
    }
    Some(text)
}

/// The maximum block size of an entry, from `.maxntid` or `.reqntid`.
fn thread_bound(entry: &str) -> Option<u32> {
    let (declaration, _) = entry.split_once("\n{")?;
    let bound = declaration.lines().find_map(|line| {
        let line = line.trim();
        line.strip_prefix(".maxntid ").or_else(|| line.strip_prefix(".reqntid "))
    })?;
    bound.split(',').map(|extent| extent.trim().parse::<u32>().ok()).product()
}

fn table(artifacts: &Artifacts, reports: &[KernelReport]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "kernel",
        "arch",
        "registers",
        "stack",
        "spills",
        "shared",
        "calls",
        "max threads",
    ]);
    for report in reports {
        let arch = module_of(artifacts, report).map_or("-", |module| &module.info.arch);
        // Unknown without ptxas.
        let known = |value: Option<u32>| value.map_or("-".to_owned(), |value| value.to_string());
        let resources = report.resources;
        table.add_row([
            report.name.clone(),
            arch.to_owned(),
            known(resources.map(|r| r.registers)),
            stack(report),
            known(resources.map(|r| r.spill_stores + r.spill_loads)),
            known(resources.map(|r| r.static_shared)),
            calls(report),
            known(report.max_threads),
        ]);
    }
    table
}

/// The stack from ptxas, and that of the kernel itself in the PTX.
fn stack(report: &KernelReport) -> String {
    let Some(resources) = report.resources else { return "-".to_owned() };
    match report.callees.is_empty() {
        true => resources.stack.to_string(),
        false => format!("{}, own {}", resources.stack, report.own_stack),
    }
}

/// The functions that a kernel calls, with their stack, if any.
fn calls(report: &KernelReport) -> String {
    let names = report.callees.iter().map(|callee| match callee.stack {
        0 => callee.name().to_owned(),
        stack => format!("{} (stack {stack})", callee.name()),
    });
    let names: Vec<String> = names.collect();
    if names.is_empty() { "none".to_owned() } else { names.join("\n") }
}

/// All violations in all kernels.
fn check_all(artifacts: &Artifacts, reports: &[KernelReport]) -> Result<Vec<String>> {
    let mut violations = Vec::new();
    if reports.is_empty() {
        violations.push("there are no kernels".to_owned());
    }
    for module in &artifacts.modules {
        let text = fs::read_to_string(&module.ptx)?;
        let of_module: Vec<&KernelReport> =
            reports.iter().filter(|report| report.file == module.file).collect();
        if of_module.is_empty() {
            continue;
        }
        for report in of_module {
            let bound = body(&text, &report.name).and_then(|entry| thread_bound(&entry));
            violations.extend(check_kernel(report, bound.unwrap_or(THREADS)));
        }
        if text.contains(".callprototype") {
            violations
                .push(format!("{}.rs: indirect calls are left (.callprototype)", module.file));
        }
    }
    match artifacts.report_on(NEWER_ARCH) {
        Ok(newer) => {
            let broken = newer.iter().flat_map(|report| check_kernel(report, 0));
            violations.extend(broken.map(|what| format!("for {}: {what}", NEWER_ARCH.name())));
        }
        Err(error) => violations.push(format!("for {}: {error}", NEWER_ARCH.name())),
    }
    Ok(violations)
}

/// A kernel's violations, for this block size.
fn check_kernel(report: &KernelReport, threads: u32) -> Vec<String> {
    let name = &report.name;
    let (Some(resources), Some(max_threads)) = (report.resources, report.max_threads) else {
        return vec![format!("{name}: built without ptxas, so its resources are unknown")];
    };
    let mut violations = Vec::new();
    if max_threads < threads {
        violations.push(format!(
            "{name}: {} registers allow {max_threads} threads per block, required are {threads}",
            resources.registers
        ));
    }
    let spills = (resources.spill_stores + resources.spill_loads) as usize;
    // ptxas' stack includes that of GIN operations, which have their own limit below.
    let stack = if report.uses_gin() { report.own_stack } else { resources.stack as usize };
    for (count, what) in [(stack, "bytes of stack"), (spills, "bytes of spills")] {
        if count > 0 {
            violations.push(format!("{name}: {count} {what}, none are allowed"));
        }
    }
    if resources.serialized {
        violations.push(format!("{name}: ptxas serialises the wgmma instructions (C7510)"));
    }
    for callee in &report.callees {
        let path = &callee.path;
        match callee.kind() {
            CalleeKind::GinOperation if callee.stack > DESCRIPTOR => violations.push(format!(
                "{name}: {path} has {} bytes of stack, {DESCRIPTOR} are allowed",
                callee.stack
            )),
            CalleeKind::GinOperation => {}
            CalleeKind::Assertion if report.uses_gin() => {}
            _ => violations.push(format!("{name}: it calls {path}")),
        }
    }
    violations
}

#[cfg(test)]
mod tests {
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
        for part in [
            "calls __assertfail",
            "calls my::helper::<f32>",
            "16 bytes of stack",
            "12 bytes of spills",
        ] {
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
}
