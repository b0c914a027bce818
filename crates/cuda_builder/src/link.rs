//! Links one kernel file with NCCL's device code and makes PTX of it.
//!
//! The order of the steps is the point. rustc marks nothing `convergent`, so LLVM would copy a
//! barrier into both branches of a condition: nothing may optimise before the marks are set. The
//! crates are compiled without LLVM passes, and [`link`] sets the marks before it runs the first.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::coop;
use crate::llvm::{At, Context, Failure, Function, Linkage, Llvm, Machine, Module, Result, Value};
use crate::split::{self, DRIVER_FUNCTIONS};

/// The array that `cuda_std` declares for the shared memory that a launch asks for.
pub(crate) const DYNAMIC_SHARED: &str = "__cuda_std_dynamic_shared";

/// Sections whose statics live in shared memory.
const SHARED_SECTION: &str = ".shared";

/// What nothing uses goes first, so that no time is spent on it. No panic unwinds on a GPU: a call
/// that could becomes a plain one.
const CLEAN: &str = "globaldce,function(lower-invoke)";

/// The second O3 is needed: after one, arrays that are indexed in loops stay in local memory.
const OPTIMISE: &str = "default<O3>,default<O3>";

/// Part of each cache key: change it when the same input gives another result.
pub(crate) const REVISION: u32 = 8;

/// What to prepare.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PrepareNccl {
    pub(crate) bitcode: PathBuf,
    pub(crate) prepared: PathBuf,
}

/// Makes NCCL's bitcode ready to be linked, once for all modules: its calls through cooperative
/// groups are marked, and each of its functions is taken only when needed.
pub(crate) fn prepare_nccl(llvm: &Llvm, job: &PrepareNccl) -> Result<usize> {
    let context = Context::new(llvm);
    let nccl = context.read(&job.bitcode)?;
    let marked = coop::mark_group_calls(&nccl)?;
    coop::pass_groups_uncopied(&nccl)?;
    split::only_when_needed(&nccl, |_| false);
    nccl.verify()?;
    nccl.write_bitcode(&job.prepared)?;
    Ok(marked)
}

/// What to link.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Link {
    pub(crate) file: String,
    pub(crate) kernels: Vec<String>,
    /// For each, the most threads that a block has, if it says so.
    pub(crate) max_threads: Vec<Option<u32>>,
    pub(crate) bitcode: PathBuf,
    /// NCCL's device code, prepared; `None` when the file calls none of it.
    pub(crate) nccl: Option<PathBuf>,
    pub(crate) cpu: String,
    pub(crate) features: String,
    /// A folder for the module's IR before and after optimisation.
    pub(crate) dump: Option<PathBuf>,
}

/// What linking a kernel file gives.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Linked {
    pub(crate) ptx: String,
    /// The kernels that open sessions on LSA barriers.
    pub(crate) lsa_barriers: Vec<String>,
}

/// NCCL's function that opens a session on an LSA barrier.
const OPEN_LSA_BARRIER: &str = "ncclLsaBarrierSessionInit";

/// Links and compiles one kernel file.
pub(crate) fn link(llvm: &Llvm, job: &Link) -> Result<Linked> {
    let context = Context::new(llvm);
    let mut module = context.read(&job.bitcode)?;
    module.set_name(&job.file);
    if let Some(nccl) = &job.nccl {
        let nccl = context.read_lazily(nccl)?;
        // clang 20 spelt out less of the layout than newer LLVMs do. Nothing in NCCL's code depends
        // on the difference, but LLVM warns of it.
        nccl.set_data_layout(&module.data_layout())?;
        check_signatures(&module, &nccl)?;
        module.link_in(nccl)?;
    }
    move_shared_memory(&module)?;
    pass_by_value(&module)?;
    bound_blocks(&module, job);
    mark_convergent(&module)?;
    export_only(&module, &job.kernels);
    module.verify()?;
    dump(&module, job, "before")?;
    let lsa_barriers = callers(&module, &job.kernels, OPEN_LSA_BARRIER);

    let machine = Machine::new(llvm, &job.cpu, &job.features)?;
    module.optimise(&machine, CLEAN)?;
    inline_what_is_called_once(&module)?;
    module.optimise(&machine, OPTIMISE)?;
    module.functions().into_iter().for_each(Function::forget_unwinding);
    dump(&module, job, "after")?;

    check_resolved(&module)?;
    Ok(Linked { ptx: module.emit(&machine)?, lsa_barriers })
}

/// The kernels from which calls lead to a function.
fn callers(module: &Module<'_>, kernels: &[String], function: &str) -> Vec<String> {
    let functions = module.functions();
    let by_name: HashMap<String, Function<'_>> =
        functions.iter().map(|function| (function.name(), *function)).collect();
    let mut callers = Vec::new();
    for kernel in kernels {
        let (mut seen, mut next) = (HashSet::from([kernel.clone()]), vec![kernel.clone()]);
        while let Some(name) = next.pop() {
            let Some(caller) = by_name.get(&name) else { continue };
            for instruction in caller.instructions() {
                let called = instruction.call().and_then(|(called, _)| called.as_function());
                if let Some(called) = called.map(|called| called.name())
                    && seen.insert(called.clone())
                {
                    next.push(called);
                }
            }
        }
        if seen.contains(function) {
            callers.push(kernel.clone());
        }
    }
    callers
}

/// A function that is declared with other types than it is defined with is called through a pointer
/// of the declared type: nothing is inlined, and what does not fit is garbage.
fn check_signatures(module: &Module<'_>, nccl: &Module<'_>) -> Result<()> {
    let defined = nccl.functions();
    let defined: HashMap<String, Function<'_>> =
        defined.into_iter().map(|function| (function.name(), function)).collect();
    let declared = module.functions().into_iter().filter(|function| function.is_declaration());
    let mut faults = Vec::new();
    for declaration in declared {
        let Some(definition) = defined.get(&declaration.name()) else { continue };
        let (ours, nccls) = (declaration.signature(), definition.signature());
        if ours != nccls {
            let (name, ours, nccls) = (declaration.name(), ours.text(), nccls.text());
            faults.push(format!("`{name}` is declared as `{ours}`, and NCCL's is `{nccls}`"));
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(Failure(faults.join("; "))) }
}

/// Rust has no statics in shared memory: a section, or the name of the dynamic array, stands for
/// it.
fn move_shared_memory(module: &Module<'_>) -> Result<()> {
    for global in module.globals() {
        if global.section().starts_with(SHARED_SECTION) {
            let undefined = global.initializer().is_none_or(|value| value.is_undefined());
            if !undefined {
                return Err(Failure(format!(
                    "the shared-memory static `{}` has an initial value, which the GPU cannot \
                     give it; declare it as `MaybeUninit::uninit()` and store to it in the kernel",
                    demangled(&global.name())
                )));
            }
            module.move_to_shared(global)?;
        } else if global.name() == DYNAMIC_SHARED {
            module.move_to_shared(global)?;
        }
    }
    Ok(())
}

/// A kernel's parameter that is a reference in Rust stands for the bytes behind it: the launch
/// passes those, and the kernel reads them where they are. (A struct that Rust passes by value is
/// copied to the stack as soon as somebody needs its address.) PTX lets a kernel take the address
/// of such a parameter when nobody writes to it, which a reference promises.
fn pass_by_value(module: &Module<'_>) -> Result<()> {
    let context = module.context();
    let size = context.attribute("dereferenceable")?;
    let constant = context.target_attribute("nvvm.grid_constant", "");
    for kernel in module.functions().into_iter().filter(|function| function.is_kernel()) {
        for index in 0..kernel.parameters().len() as u32 {
            let at = At::Argument(index);
            let Some(bytes) = kernel.attribute_value(at, size) else { continue };
            kernel.add_attribute(at, context.by_value(bytes)?);
            kernel.add_attribute(at, constant);
        }
    }
    Ok(())
}

/// Tells the assembler how large a block can be, and so how many registers a thread can have.
fn bound_blocks(module: &Module<'_>, job: &Link) {
    for (kernel, threads) in job.kernels.iter().zip(&job.max_threads) {
        let function = module.functions().into_iter().find(|function| function.name() == *kernel);
        if let (Some(function), Some(threads)) = (function, threads) {
            let bound = module.context().target_attribute("nvvm.maxntid", &threads.to_string());
            function.add_attribute(At::Function, bound);
        }
    }
}

/// Forbids LLVM to make a call depend on more conditions than the source does. Only barriers need
/// it, but any function may reach one, and LLVM takes the mark off where it proves that none does.
/// Assembly is opaque to it; what says that it has no effect (`pure`) is no barrier, and may move.
fn mark_convergent(module: &Module<'_>) -> Result<()> {
    let convergent = module.context().attribute("convergent")?;
    for function in module.functions().into_iter().filter(|f| !f.is_intrinsic()) {
        function.add_attribute(At::Function, convergent);
        for instruction in function.instructions() {
            // A direct call has the mark of its function; asm and indirect calls need their own.
            let needs_own =
                |called: Value<'_>| called.as_function().is_none() && !called.is_pure_asm();
            if instruction.call().is_some_and(|(called, _)| needs_own(called)) {
                instruction.add_attribute(At::Function, convergent);
            }
        }
    }
    Ok(())
}

/// Inlines what has one caller, however large: the closure that is the body of a barrier's scope,
/// for one. A call costs a stack frame, and hides from LLVM what the caller knows.
fn inline_what_is_called_once(module: &Module<'_>) -> Result<()> {
    let context = module.context();
    let kept_apart = [context.attribute("noinline")?, context.attribute("cold")?];
    let inline = context.attribute("alwaysinline")?;
    for function in module.functions() {
        let is_ours = !function.is_declaration() && !function.is_kernel();
        if is_ours
            && function.is_called_once()
            && !kept_apart.iter().any(|mark| function.has_attribute(At::Function, *mark))
        {
            function.add_attribute(At::Function, inline);
        }
    }
    Ok(())
}

/// Leaves this file's kernels as the only symbols that others can see, so that all else can go
/// once it is inlined.
fn export_only(module: &Module<'_>, kernels: &[String]) {
    let functions = module.functions();
    let functions = functions.into_iter().map(|function| function.global());
    for symbol in functions.chain(module.globals()).chain(module.aliases()) {
        let name = symbol.name();
        if !symbol.is_declaration() && !name.starts_with("llvm.") && !kernels.contains(&name) {
            symbol.set_linkage(Linkage::INTERNAL);
        }
    }
}

/// The GPU has no linker behind this one: whatever is undefined now would fail at load.
fn check_resolved(module: &Module<'_>) -> Result<()> {
    let mut faults = Vec::new();
    for name in split::undefined(module) {
        if DRIVER_FUNCTIONS.contains(&name.as_str()) {
            continue;
        }
        faults.push(format!("`{}`, used by {}", demangled(&name), users(module, &name)));
    }
    if faults.is_empty() {
        return Ok(());
    }
    Err(Failure(format!(
        "unresolved device symbol: {}",
        faults.join("; unresolved device symbol: ")
    )))
}

/// The functions that use a symbol, in words.
fn users(module: &Module<'_>, name: &str) -> String {
    let functions = module.functions();
    let uses = |function: &&Function<'_>| {
        function
            .instructions()
            .into_iter()
            .any(|instruction| instruction.operands().iter().any(|operand| operand.name() == name))
    };
    let mut users: Vec<String> =
        functions.iter().filter(uses).map(|f| format!("`{}`", demangled(&f.name()))).collect();
    users.dedup();
    if users.is_empty() { "a static".to_owned() } else { users.join(", ") }
}

fn demangled(name: &str) -> String {
    format!("{:#}", rustc_demangle::demangle(name))
}

fn dump(module: &Module<'_>, job: &Link, stage: &str) -> Result<()> {
    let path = |folder: &Path| folder.join(format!("{}.{stage}.ll", job.file));
    job.dump.as_deref().map_or(Ok(()), |folder| module.print(&path(folder)))
}
