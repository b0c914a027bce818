//! Reports the resources, stack and calls of each kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use crate::arch::NvvmArch;
use crate::artifact::{self, Artifacts, Kernel, ModuleArtifact};
use crate::error::Error;
use crate::lines::Lines;
use crate::parallel;
use crate::ptx::Ptx;
use crate::ptxas::{Ptxas, Resources};
use crate::traps::in_loops;

/// Report on one kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelReport {
    /// The name of the entry.
    pub name: String,
    /// Stem of the kernel file.
    pub file: String,
    /// The resources; `None` without `ptxas`. The stack includes that of called functions, most of
    /// which `ptxas` inlines.
    pub resources: Option<Resources>,
    /// The maximum block size that the register file allows; `None` without `ptxas`.
    pub max_threads: Option<u32>,
    /// Stack of the kernel itself in the PTX, in bytes, without called functions.
    pub own_stack: usize,
    /// Number of calls in the kernel's body; 0 if everything is inlined.
    pub calls: usize,
    /// All functions called directly or indirectly, by name.
    pub callees: Vec<Callee>,
    /// Indirect calls in the kernel's module.
    pub call_prototypes: usize,
}

/// A function that a kernel calls.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Callee {
    /// The Rust path with generic arguments, or its C name.
    pub path: String,
    /// The stack in the PTX, in bytes.
    pub stack: usize,
}

/// Why a function is not inlined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CalleeKind {
    /// One of NCCL's GIN operations, which `nccl_device` keeps out of line: they are too large to
    /// inline.
    GinOperation,
    /// The handler of a failed assertion.
    Assertion,
    /// No known reason: kernels should inline this function.
    Other,
}

impl Callee {
    fn of(symbol: &str, stack: usize) -> Self {
        Self { path: format!("{:#}", rustc_demangle::demangle(symbol)), stack }
    }

    /// Returns why it is not inlined.
    pub fn kind(&self) -> CalleeKind {
        match self.path.as_str() {
            "__assertfail" => CalleeKind::Assertion,
            path if path.starts_with("nccl_device::gin::") && self.name().starts_with("gin_") => {
                CalleeKind::GinOperation
            }
            _ => CalleeKind::Other,
        }
    }

    /// Returns the last segment of the path, without generic arguments.
    pub fn name(&self) -> &str {
        let path = self.path.split("::<").next().unwrap_or_default();
        path.rsplit("::").next().unwrap_or_default()
    }
}

impl KernelReport {
    /// Returns whether the kernel uses GIN, and so may call its operations.
    pub fn uses_gin(&self) -> bool {
        self.callees.iter().any(|callee| callee.kind() == CalleeKind::GinOperation)
    }

    /// Returns what slows the kernel down (too many registers, stack, spills, serialised `wgmma`),
    /// with the numbers; nothing without `ptxas`. `threads` is the block size that it must allow.
    pub fn costs(&self, threads: u32) -> Vec<String> {
        let Some(resources) = self.resources else { return Vec::new() };
        let mut costs = Vec::new();
        let (registers, most) = (resources.registers, resources.max_threads());
        if most < threads {
            costs.push(format!(
                "{registers} registers allow {most} threads per block, required are {threads}"
            ));
        }
        let spills = (resources.spill_stores + resources.spill_loads) as usize;
        // ptxas' stack includes that of GIN operations.
        let stack = if self.uses_gin() { self.own_stack } else { resources.stack as usize };
        for (count, what) in [(stack, "bytes of stack"), (spills, "bytes of spills")] {
            if count > 0 {
                costs.push(format!("{count} {what}, none are allowed"));
            }
        }
        if resources.serialized {
            costs.push("ptxas serialises the wgmma instructions (C7510)".to_owned());
        }
        costs
    }
}

impl Artifacts {
    /// Reports on all kernels, in module order.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::Ptx`] when the PTX on disk cannot be read.
    pub fn report(&self) -> Result<Vec<KernelReport>, Error> {
        let module_reports = |module| reports(module, |kernel| kernel.resources);
        Ok(self.modules.iter().map(module_reports).collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// Reports on the kernels of those modules that `ptxas` says have stack, spills or serialised
    /// instructions.
    pub(crate) fn costly(&self) -> Result<Vec<KernelReport>, Error> {
        let is_costly = |kernel: &Kernel| {
            kernel.resources.is_some_and(|it| it.stack + it.spill_stores > 0 || it.serialized)
        };
        let modules =
            self.modules.iter().filter(|module| module.info.kernels.iter().any(is_costly));
        let module_reports = |module| reports(module, |kernel| kernel.resources);
        Ok(modules.map(module_reports).collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// Returns the checks that can fail in a loop: by their place, `file:line:column`, the kernels
    /// that have them. Each iteration of the loop computes them, and the compiler may not move what
    /// follows a check in front of it.
    ///
    /// A check that is inlined from Rust's standard library has the place of the user's code that
    /// precedes it in the PTX.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the PTX on disk cannot be read.
    pub fn checks_in_loops(&self) -> Result<BTreeMap<String, Vec<String>>, Error> {
        let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for module in &self.modules {
            let text = fs::read_to_string(&module.ptx).map_err(Error::io("read", &module.ptx))?;
            let lines = Lines::of(&text);
            for kernel in &module.info.kernels {
                for place in in_loops(&lines, &kernel.name) {
                    all.entry(place).or_default().push(kernel.name.clone());
                }
            }
        }
        Ok(all)
    }

    /// Does the same as [`report`](Self::report), for the same PTX assembled by `ptxas` for a newer
    /// architecture, as the driver does on such a GPU.
    /// Kernels that do not run there are omitted: [architecture-specific](ModuleArtifact::is_bound)
    /// ones, and those for a newer architecture.
    ///
    /// # Errors
    ///
    /// Also [`Error::Ptxas`] if the PTX does not assemble.
    pub fn report_on(&self, arch: NvvmArch) -> Result<Vec<KernelReport>, Error> {
        let ptxas = Ptxas::find([arch])?;
        let temp = std::env::temp_dir();
        let scratch =
            tempfile::tempdir_in(&temp).map_err(Error::io("create a folder in", &temp))?;
        let runs = |module: &&ModuleArtifact| {
            let built_for = module.info.arch.parse::<NvvmArch>();
            !module.is_bound() && built_for.is_ok_and(|built_for| built_for <= arch)
        };
        let modules: Vec<_> = self.modules.iter().filter(runs).collect();
        let report = |module: &&ModuleArtifact| {
            let cubin = scratch.path().join(&module.file);
            let made = match &ptxas {
                Some(ptxas) => {
                    ptxas.assemble(&module.file, arch.name(), &module.ptx, &cubin, true)?
                }
                None => Vec::new(),
            };
            let made: BTreeMap<_, _> = made.into_iter().collect();
            reports(module, |kernel| made.get(&kernel.name).copied())
        };
        let made = parallel::map(&modules, report).into_iter();
        Ok(made.collect::<Result<Vec<_>, Error>>()?.concat())
    }
}

/// Reports on a module's kernels, with the resources from `ptxas`.
fn reports(
    module: &ModuleArtifact,
    resources: impl Fn(&Kernel) -> Option<Resources>,
) -> Result<Vec<KernelReport>, Error> {
    let text = fs::read_to_string(&module.ptx).map_err(Error::io("read", &module.ptx))?;
    let ptx = artifact::read_ptx(&module.file, &text)?;
    let report = |kernel: &Kernel| {
        let entry = ptx.functions.iter().find(|function| function.name == kernel.name);
        let resources = resources(kernel);
        KernelReport {
            name: kernel.name.clone(),
            file: kernel.file.clone(),
            resources,
            max_threads: resources.map(|resources| resources.max_threads()),
            own_stack: entry.map_or(0, |entry| entry.stack),
            calls: entry.map_or(0, |entry| entry.calls.len()),
            callees: callees(&ptx, &kernel.name),
            call_prototypes: ptx.call_prototypes,
        }
    };
    Ok(module.info.kernels.iter().map(report).collect())
}

/// Returns all functions that this one calls directly or indirectly.
fn callees(ptx: &Ptx, name: &str) -> Vec<Callee> {
    let functions: BTreeMap<&str, _> =
        ptx.functions.iter().map(|function| (function.name.as_str(), function)).collect();
    let (mut found, mut next) = (BTreeSet::new(), vec![name]);
    while let Some(function) = next.pop().and_then(|name| functions.get(name)) {
        next.extend(function.calls.iter().map(String::as_str).filter(|name| found.insert(*name)));
        // The driver's functions have no body in this module.
        next.retain(|name| functions.contains_key(name));
    }
    let stack = |name| functions.get(name).map_or(0, |function| function.stack);
    let mut callees: Vec<Callee> =
        found.into_iter().map(|name| Callee::of(name, stack(name))).collect();
    callees.sort();
    callees
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx;

    const GIN_PUT: &str = "_RINvNvNtNtCsiOktvmIKKkQ_11nccl_device3gin5calls3put7gin_putNtNtB6_\
                           7backend5ProxyECs4DSqmUXqoWh_21devcomm_bench_kernels";

    fn module() -> Ptx {
        let text = format!(
            "
.version 8.6
.target sm_90
.extern .func __assertfail
(
	.param .b64 __assertfail_param_0
);
.func {GIN_PUT}
(
	.param .b32 p
)
;
.visible .entry first()
{{
	call.uni {GIN_PUT}, (param0);
	call.uni (retval0), {GIN_PUT}, (param0);
	ret;
}}
.visible .entry second()
{{
	.local .align 8 .b8 	__local_depot0[16];
	ret;
}}
.func {GIN_PUT}(
	.param .b32 p
)
{{
	.local .align 16 .b8 	__local_depot1[128];
	call.uni __assertfail, (param0);
}}
"
        );
        ptx::read(&text).unwrap()
    }

    #[test]
    fn indirect_callees_are_listed_too_each_with_its_own_stack() {
        let found = callees(&module(), "first");
        let calls: Vec<_> =
            found.iter().map(|callee| (callee.name(), callee.stack, callee.kind())).collect();
        let assertion = ("__assertfail", 0, CalleeKind::Assertion);
        assert_eq!(calls, [assertion, ("gin_put", 128, CalleeKind::GinOperation)]);
        assert_eq!(callees(&module(), "second"), []);
    }

    #[test]
    fn only_the_networks_own_operations_may_stay_functions() {
        let kind = |path: &str| Callee { path: path.to_owned(), stack: 0 }.kind();
        let put = "nccl_device::gin::calls::put::gin_put::<nccl_device::gin::backend::Proxy>";
        assert_eq!(kind(put), CalleeKind::GinOperation);
        for path in [
            "nccl_device::gin::calls::put::<nccl_device::gin::backend::gin_x>",
            "nccl_device::barrier::gin_sync",
            "my_kernels::gin_put",
            "ncclGinPut",
        ] {
            assert_eq!(kind(path), CalleeKind::Other, "{path}");
        }
    }
}
