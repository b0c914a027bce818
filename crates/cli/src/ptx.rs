//! `devcomm ptx`: prints the PTX and the resources of a project's kernels, and checks calls, stack
//! and registers.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package};
use comfy_table::{Table, presets};
use cuda_builder::{Artifacts, CalleeKind, CudaBuilder, KernelReport, ModuleArtifact, NvvmArch};

use crate::setup::{Optional, setup};

/// Maximum stack of a GIN operation in bytes: the size of NCCL's request descriptor.
const DESCRIPTOR: usize = 128;

/// A newer architecture for which the PTX must also pass the checks.
const NEWER_ARCH: NvvmArch = NvvmArch::Compute100;

/// Print one kernel's PTX, or write that of all kernels, and print each kernel's resources
#[derive(Debug, clap::Args)]
pub struct Ptx {
    /// The kernel's name
    #[arg(required_unless_present = "all")]
    kernel: Option<String>,
    /// All kernels: their PTX is written to a folder
    #[arg(long, conflicts_with = "kernel")]
    all: bool,
    /// Fail if a kernel has calls except GIN's operations, stack or spills, cannot be launched, or
    /// does not assemble for sm_100
    #[arg(long)]
    check: bool,
    /// The architecture to build for instead of the default, e.g. sm_100
    #[arg(long)]
    arch: Option<String>,
    /// The kernel package [default: this folder's, or the only one of the workspace]
    #[arg(short, long)]
    pub package: Option<String>,
    /// The block size that `--check` requires of a kernel without `max_threads`
    #[arg(long, default_value_t = 512)]
    threads: u32,
    /// The folder whose workspace has the package [default: the working directory]
    #[arg(skip)]
    pub folder: Option<PathBuf>,
}

impl Ptx {
    /// Builds the kernels, prints one or writes all, and prints the table. The exit code is 1 if
    /// `--check` finds a violation.
    ///
    /// # Errors
    ///
    /// If there is no kernel package or kernel of that name, or the kernels do not build.
    pub fn run(&self) -> Result<u8> {
        let arch = self.arch.as_deref().map_or(Ok(NvvmArch::Compute90), str::parse)?;
        let folder = match &self.folder {
            Some(folder) => folder.clone(),
            None => std::env::current_dir().context("the working directory")?,
        };
        let metadata = MetadataCommand::new().current_dir(&folder).no_deps().exec();
        let metadata =
            metadata.with_context(|| format!("{} is not in a cargo project", folder.display()))?;
        let package = kernel_package(&metadata, &folder, self.package.as_deref())?;
        setup(true, if self.check { Optional::Nothing } else { Optional::Ptxas })?;
        let out = metadata.target_directory.as_std_path().join("ptx");
        let out = out.join(package).join(arch.name());
        let mut builder = CudaBuilder::new(package).arch(arch).out_dir(&out);
        builder = builder.manifest_dir(metadata.workspace_root.as_std_path());
        if let Some(name) = &self.kernel {
            builder = builder.only(name);
        }
        let artifacts = builder.build()?;
        let mut reports = artifacts.report()?;
        if let Some(name) = &self.kernel {
            reports = select(reports, name);
            print!("{}", text_of(&artifacts, &reports, name)?);
            // To standard error, so that `> kernel.ptx` gets only PTX.
            eprintln!("{}", table(&artifacts, &reports)?);
        } else {
            println!("{}", table(&artifacts, &reports)?);
            println!("\nPTX, sidecars and cubins: {}", artifacts.folder.display());
        }
        if let Some(ModuleArtifact { info, .. }) = artifacts.modules.first() {
            eprintln!("compiled by {}, LLVM {}", info.rustc, info.llvm);
        }
        if !self.check {
            return Ok(0);
        }
        let violations = check_all(&artifacts, &reports, self.threads)?;
        for violation in &violations {
            eprintln!("violation: {violation}");
        }
        for (place, mut kernels) in artifacts.checks_in_loops()? {
            kernels.retain(|kernel| is_among(&reports, kernel));
            if !kernels.is_empty() {
                let kernels = kernels.join(", ");
                eprintln!("note: {place}: checks that can fail in a loop: {kernels}");
            }
        }
        if violations.is_empty() {
            eprintln!("checked {} kernels: no violations", reports.len());
        }
        Ok(u8::from(!violations.is_empty()))
    }
}

/// Returns the kernel package to build: the wanted one, else the one in this folder, else the only
/// one.
fn kernel_package<'a>(
    metadata: &'a Metadata,
    folder: &Path,
    wanted: Option<&'a str>,
) -> Result<&'a str> {
    if let Some(wanted) = wanted {
        return Ok(wanted);
    }
    let all: Vec<&Package> = metadata.packages.iter().filter(|one| is_kernels(one)).collect();
    let here = all
        .iter()
        .find(|package| package.manifest_path.parent().is_some_and(|parent| parent == folder));
    match (here, &all[..]) {
        (Some(package), _) | (None, [package]) => Ok(package.name.as_str()),
        (None, []) => bail!(
            "the workspace of {} has no kernel package: a library that depends on \
             devcomm-cuda-std, and not on devcomm",
            metadata.workspace_root
        ),
        (None, several) => {
            let names: Vec<&str> = several.iter().map(|package| package.name.as_str()).collect();
            bail!("choose a kernel package by --package: {}", names.join(", "))
        }
    }
}

/// Returns whether it is a library for GPUs: it has `cuda_std`, and not the host crates.
fn is_kernels(package: &Package) -> bool {
    let depends = |on: &str| {
        let normal = package.dependencies.iter().filter(|one| one.kind == DependencyKind::Normal);
        normal.into_iter().any(|one| one.name == on)
    };
    let is_library = package.targets.iter().any(|target| target.is_lib());
    is_library && depends("devcomm-cuda-std") && !depends("devcomm") && !depends("devcomm-host")
}

/// Returns the kernel with this name, or the kernels of the file with this name.
fn select(mut reports: Vec<KernelReport>, name: &str) -> Vec<KernelReport> {
    let is_kernel = reports.iter().any(|report| report.name == name);
    reports.retain(|report| if is_kernel { report.name == name } else { report.file == name });
    reports
}

fn is_among(reports: &[KernelReport], kernel: &str) -> bool {
    reports.iter().any(|report| report.name == kernel)
}

fn module_of<'a>(artifacts: &'a Artifacts, report: &KernelReport) -> Option<&'a ModuleArtifact> {
    artifacts.modules.iter().find(|module| module.file == report.file)
}

fn read(module: &ModuleArtifact) -> Result<String> {
    fs::read_to_string(&module.ptx).with_context(|| format!("cannot read {}", module.ptx.display()))
}

/// Returns the PTX of one kernel, or of the file with this name.
fn text_of(artifacts: &Artifacts, reports: &[KernelReport], name: &str) -> Result<String> {
    let report = reports.first().context("no kernel is selected")?;
    let module = module_of(artifacts, report).context("the kernel has no module")?;
    let text = read(module)?;
    if report.name != name {
        return Ok(text);
    }
    let kernel = body(&text, name)
        .with_context(|| format!("no entry {name} in {}", module.ptx.display()))?;
    Ok(format!("// {name}, of {}\n{}{kernel}", module.ptx.display(), head(&text)))
}

/// Returns the directives at the start of a module.
fn head(ptx: &str) -> String {
    let directives = [".version", ".target", ".address_size"];
    let lines = ptx.lines().filter(|line| directives.iter().any(|name| line.starts_with(name)));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Returns one entry of a module, from its directive to its closing brace.
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

/// Returns the maximum block size of an entry, from `.maxntid` or `.reqntid`.
fn thread_bound(entry: &str) -> Option<u32> {
    let (declaration, _) = entry.split_once("\n{")?;
    let bound = declaration.lines().find_map(|line| {
        let line = line.trim();
        line.strip_prefix(".maxntid ").or_else(|| line.strip_prefix(".reqntid "))
    })?;
    bound.split(',').map(|extent| extent.trim().parse::<u32>().ok()).product()
}

fn table(artifacts: &Artifacts, reports: &[KernelReport]) -> Result<Table> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header([
        "kernel",
        "arch",
        "registers",
        "stack",
        "spills",
        "shared",
        "calls",
        "panics",
        "max threads",
    ]);
    for report in reports {
        let module = module_of(artifacts, report).context("the kernel has no module")?;
        // Unknown without ptxas.
        let known = |value: Option<u32>| value.map_or("-".to_owned(), |value| value.to_string());
        let resources = report.resources;
        table.add_row([
            report.name.clone(),
            module.info.arch.clone(),
            known(resources.map(|r| r.registers)),
            stack(report),
            known(resources.map(|r| r.spill_stores + r.spill_loads)),
            known(resources.map(|r| r.static_shared)),
            calls(report),
            panics(&read(module)?, &report.name).to_string(),
            known(report.max_threads),
        ]);
    }
    Ok(table)
}

/// Returns the stack from ptxas, and that of the kernel itself in the PTX.
fn stack(report: &KernelReport) -> String {
    let Some(resources) = report.resources else { return "-".to_owned() };
    match report.callees.is_empty() {
        true => resources.stack.to_string(),
        false => format!("{}, own {}", resources.stack, report.own_stack),
    }
}

/// Returns the functions that a kernel calls, with their stack, if any.
fn calls(report: &KernelReport) -> String {
    let names = report.callees.iter().map(|callee| match callee.stack {
        0 => callee.name().to_owned(),
        stack => format!("{} (stack {stack})", callee.name()),
    });
    let names: Vec<String> = names.collect();
    if names.is_empty() { "none".to_owned() } else { names.join("\n") }
}

/// Returns the number of places in a kernel's own code that panic: a `trap` whose line information
/// names `core`'s panicking functions, which are inlined.
fn panics(module: &str, kernel: &str) -> usize {
    let source = |line: &str| line.trim().strip_prefix(".file").map(str::to_owned);
    let is_core = |line: &String| line.trim_end_matches('"').ends_with("/core/src/panicking.rs");
    let number = |line: &str| line.split_whitespace().next().map(str::to_owned);
    let core: Vec<String> = module
        .lines()
        .filter_map(source)
        .filter(is_core)
        .filter_map(|line| number(&line))
        .collect();
    let (mut at, mut count) = (None, 0);
    for line in body(module, kernel).unwrap_or_default().lines() {
        let line = line.trim();
        if let Some(place) = line.strip_prefix(".loc") {
            at = number(place);
        } else if line.ends_with("trap;") {
            count += usize::from(at.as_ref().is_some_and(|file| core.contains(file)));
        }
    }
    count
}

/// Returns all violations in all kernels. `threads` is the block size that a kernel without a bound
/// of its own must allow.
fn check_all(artifacts: &Artifacts, reports: &[KernelReport], threads: u32) -> Result<Vec<String>> {
    let mut violations = Vec::new();
    if reports.is_empty() {
        violations.push("there are no kernels".to_owned());
    }
    for module in &artifacts.modules {
        let text = read(module)?;
        let of_module: Vec<&KernelReport> =
            reports.iter().filter(|report| report.file == module.file).collect();
        if of_module.is_empty() {
            continue;
        }
        for report in of_module {
            let bound = body(&text, &report.name).and_then(|entry| thread_bound(&entry));
            violations.extend(check_kernel(report, bound.unwrap_or(threads)));
        }
        if text.contains(".callprototype") {
            violations
                .push(format!("{}.rs: indirect calls are left (.callprototype)", module.file));
        }
    }
    match artifacts.report_on(NEWER_ARCH) {
        Ok(newer) => violations.extend(check_newer(&newer, reports)),
        Err(error) => violations.push(format!("for {}: {error}", NEWER_ARCH.name())),
    }
    Ok(violations)
}

/// Returns the violations on the newer architecture of the kernels in `reports`; `newer` may have
/// others of their files.
fn check_newer(newer: &[KernelReport], reports: &[KernelReport]) -> Vec<String> {
    // Whether it can be launched is checked on the architecture that it was built for.
    let any_threads = 0;
    let checked = newer.iter().filter(|report| is_among(reports, &report.name));
    let broken = checked.flat_map(|report| check_kernel(report, any_threads));
    broken.map(|what| format!("for {}: {what}", NEWER_ARCH.name())).collect()
}

/// Returns a kernel's violations, which must allow blocks of this size.
fn check_kernel(report: &KernelReport, threads: u32) -> Vec<String> {
    let name = &report.name;
    if report.resources.is_none() {
        return vec![format!("{name}: built without ptxas, so its resources are unknown")];
    }
    let costs = report.costs(threads);
    let mut violations: Vec<String> = costs.iter().map(|cost| format!("{name}: {cost}")).collect();
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
mod tests;
