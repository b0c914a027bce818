//! Links one kernel file with NCCL's device code and compiles it to PTX.
//!
//! The order of the steps matters. rustc marks nothing `convergent`, so LLVM could copy a barrier
//! into both branches of a condition: no pass may run before that attribute is set. The crates are
//! compiled without LLVM passes, and [`link`] sets the attribute before it runs the first pass.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::llvm::{
    AttributePlace, Context, Failure, Function, Linkage, Llvm, Module, Result, TargetMachine, Value,
};
use crate::names::{DRIVER_FUNCTIONS, DYNAMIC_SHARED, demangled};
use crate::{coop, inline, split};

/// The section of statics in shared memory.
const SHARED_SECTION: &str = ".shared";

/// Removes dead code first, to save time. Nothing unwinds on a GPU: invokes become calls.
const CLEAN: &str = "globaldce,function(lower-invoke)";

/// The second O3 is needed: after one, arrays indexed in loops stay in local memory.
const OPTIMISE: &str = "default<O3>,default<O3>";

/// Options of LLVM's back end, in the order in which they are tried until no kernel of a module
/// spills registers.
///
/// How `ptxas` allocates registers depends on the order of the basic blocks that it gets: a kernel
/// at its limit may spill with one order and not with another. LLVM orders, joins and copies blocks
/// for a processor's branch predictor; from 23 on it can also invert the conditions of branches in
/// PTX, and then 13 of devcomm's kernels spill. Short kernels are faster in LLVM's order.
/// Loop strength reduction keeps a register for each address that a loop computes.
pub(crate) const BACK_ENDS: [&[&str]; 3] = [
    &[],
    &["-disable-block-placement", "-disable-branch-fold", "-disable-early-taildup"],
    &["-disable-lsr"],
];

/// Part of each cache key: change it when equal inputs give another result.
pub(crate) const REVISION: u32 = 21;

/// A request to prepare NCCL's bitcode.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PrepareNccl {
    pub(crate) bitcode: PathBuf,
    pub(crate) prepared: PathBuf,
}

/// Prepares NCCL's bitcode for linking, once for all modules: marks calls through coops (NCCL's
/// cooperative groups), lets loops be unrolled, and makes each function `linkonce`, linked only if
/// used.
pub(crate) fn prepare_nccl(llvm: &Llvm, job: &PrepareNccl) -> Result<usize> {
    let context = Context::new(llvm);
    let nccl = context.read(&job.bitcode)?;
    let marked = coop::mark_coop_calls(&nccl)?;
    coop::pass_coops_by_pointer(&nccl)?;
    allow_unrolling(&nccl);
    split::make_linkonce(&nccl, |_| false);
    nccl.verify()?;
    nccl.write_bitcode(&job.prepared)?;
    Ok(marked)
}

/// Lets LLVM unroll NCCL's loops. The bitcode forbids it for every one, as clang notes where it
/// does not unroll itself. But a put sets its descriptor in a loop, which stays in local memory
/// until the loop is unrolled.
fn allow_unrolling(nccl: &Module<'_>) {
    for function in nccl.functions() {
        function.instructions().into_iter().for_each(|one| one.remove_metadata("llvm.loop"));
    }
}

/// A request to link.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Link {
    pub(crate) file: String,
    pub(crate) kernels: Vec<String>,
    /// The maximum block size of each kernel, if declared.
    pub(crate) max_threads: Vec<Option<u32>>,
    /// The blocks of each kernel that a multiprocessor has room for, at least, if declared.
    pub(crate) min_blocks: Vec<Option<u32>>,
    /// The number of blocks per cluster of each kernel, if declared.
    pub(crate) clusters: Vec<Option<u32>>,
    pub(crate) bitcode: PathBuf,
    /// NCCL's prepared device code; `None` if the file calls none of it.
    pub(crate) nccl: Option<PathBuf>,
    pub(crate) cpu: String,
    pub(crate) features: String,
    /// The index of the module's back end in [`BACK_ENDS`].
    pub(crate) back_end: usize,
    /// A folder for the module's IR before and after optimisation.
    pub(crate) dump: Option<PathBuf>,
}

/// The result of linking a kernel file.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Linked {
    pub(crate) ptx: String,
    /// The kernels that open sessions on the device communicator's LSA barriers.
    pub(crate) lsa_barriers: Vec<String>,
}

/// NCCL's function that opens an LSA barrier session.
const OPEN_LSA_BARRIER: &str = "ncclLsaBarrierSessionInit";

/// What `nccl_device` calls where a kernel takes the LSA barriers of the device communicator.
const BUILT_IN: &str = "devcomm_built_in_lsa_barriers";

/// What it calls where a kernel takes a set of LSA barriers by a handle.
const BY_HANDLE: &str = "devcomm_lsa_barriers_by_handle";

/// Links and compiles one kernel file.
pub(crate) fn link(llvm: &Llvm, job: &Link) -> Result<Linked> {
    let context = Context::new(llvm);
    let mut module = context.read(&job.bitcode)?;
    module.set_name(&job.file);
    inline::mark(&module)?;
    if let Some(nccl) = &job.nccl {
        let nccl = context.read_lazily(nccl)?;
        // clang 20's data layout specifies less than that of newer LLVMs. NCCL's code does not
        // depend on the difference, but LLVM warns about it.
        nccl.set_data_layout(&module.data_layout())?;
        check_signatures(&module, &nccl)?;
        module.link_in(nccl)?;
    }
    let lsa_barriers = built_in_barriers(&module, &job.kernels);
    move_shared_memory(&module)?;
    pass_by_value(&module)?;
    set_attribute(&module, &job.kernels, &job.max_threads, "nvvm.maxntid");
    set_attribute(&module, &job.kernels, &job.min_blocks, "nvvm.minctasm");
    set_attribute(&module, &job.kernels, &job.clusters, "nvvm.cluster_dim");
    mark_convergent(&module)?;
    export_only(&module, &job.kernels);
    module.verify()?;
    dump(&module, job, "before")?;

    let machine = TargetMachine::new(llvm, &job.cpu, &job.features)?;
    module.optimise(&machine, CLEAN)?;
    inline::mark_single_callers(&module)?;
    module.optimise(&machine, OPTIMISE)?;
    module.functions().into_iter().for_each(Function::remove_personality);
    dump(&module, job, "after")?;

    check_resolved(&module)?;
    check_supported(&module)?;
    Ok(Linked { ptx: module.emit(&machine)?, lsa_barriers })
}

/// Returns the kernels that open sessions on the device communicator's LSA barriers, and removes
/// the calls that tell so. A kernel that calls neither has NCCL's function from
/// `nccl_device::raw`.
fn built_in_barriers(module: &Module<'_>, kernels: &[String]) -> Vec<String> {
    let mut open = callers(module, kernels, OPEN_LSA_BARRIER);
    let [built_in, by_handle] = [BUILT_IN, BY_HANDLE].map(|name| callers(module, kernels, name));
    open.retain(|kernel| built_in.contains(kernel) || !by_handle.contains(kernel));
    for instruction in module.functions().into_iter().flat_map(|one| one.instructions()) {
        let called = instruction.call().and_then(|(called, _)| called.as_function());
        if called.is_some_and(|called| [BUILT_IN, BY_HANDLE].contains(&&*called.name())) {
            instruction.remove();
        }
    }
    open
}

/// Returns the kernels that call a function directly or indirectly.
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

/// Refuses a function declared with other types than its definition's. LLVM would not inline it,
/// and mismatched arguments would be garbage.
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
            faults.push(format!("`{name}` is declared as `{ours}`, but NCCL's is `{nccls}`"));
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(Failure(faults.join("; "))) }
}

/// Moves statics to shared memory. Rust cannot declare them there: a section, or the name of the
/// dynamic array, marks them.
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

/// Passes kernel parameters that are references in Rust by value (`byval`): the launch passes the
/// bytes, and the kernel reads them in place. (A struct that Rust passes by value is copied to the
/// stack as soon as its address is needed.) PTX allows taking the address of such a parameter if
/// nothing writes to it, which a shared reference guarantees.
fn pass_by_value(module: &Module<'_>) -> Result<()> {
    let context = module.context();
    let size = context.attribute("dereferenceable")?;
    let constant = context.target_attribute("nvvm.grid_constant", "");
    for kernel in module.functions().into_iter().filter(|function| function.is_kernel()) {
        for index in 0..kernel.parameters().len() as u32 {
            let at = AttributePlace::Argument(index);
            let Some(bytes) = kernel.attribute_value(at, size) else { continue };
            kernel.add_attribute(at, context.by_value(bytes)?);
            kernel.add_attribute(at, constant);
        }
    }
    Ok(())
}

/// Sets a target attribute of the kernels that declare a number for it.
fn set_attribute(module: &Module<'_>, kernels: &[String], numbers: &[Option<u32>], name: &str) {
    for (kernel, number) in kernels.iter().zip(numbers) {
        let function = module.functions().into_iter().find(|function| function.name() == *kernel);
        if let (Some(function), Some(number)) = (function, number) {
            let attribute = module.context().target_attribute(name, &number.to_string());
            function.add_attribute(AttributePlace::Function, attribute);
        }
    }
}

/// Marks everything `convergent`: LLVM may not make a call control-dependent on more conditions.
/// Only barriers need it, but any function may reach one, and LLVM drops the attribute where it
/// proves that none does. Assembly is opaque; assembly without side effects (`pure`) is no barrier,
/// and may move.
fn mark_convergent(module: &Module<'_>) -> Result<()> {
    let convergent = module.context().attribute("convergent")?;
    for function in module.functions().into_iter().filter(|f| !f.is_intrinsic()) {
        function.add_attribute(AttributePlace::Function, convergent);
        for instruction in function.instructions() {
            // A direct call inherits its function's attribute; assembly and indirect calls need
            // their own.
            let needs_own =
                |called: Value<'_>| called.as_function().is_none() && !called.is_pure_asm();
            if instruction.call().is_some_and(|(called, _)| needs_own(called)) {
                instruction.add_attribute(AttributePlace::Function, convergent);
            }
        }
    }
    Ok(())
}

/// Exports only this file's kernels, so that everything else can be removed once inlined.
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

/// Fails on an undefined symbol: no other linker follows, and the driver could not load the PTX.
fn check_resolved(module: &Module<'_>) -> Result<()> {
    let mut faults = Vec::new();
    for name in split::undefined(module) {
        if DRIVER_FUNCTIONS.contains(&name.as_str()) {
            continue;
        }
        let by = users(module, &name);
        faults.push(format!("`{}`, used by {by}; {}", demangled(&name), instead_of(&name)));
    }
    if faults.is_empty() {
        return Ok(());
    }
    Err(Failure(format!(
        "unresolved device symbol: {}",
        faults.join("\nunresolved device symbol: ")
    )))
}

/// Returns what provides a symbol that is not there, or what to use instead.
fn instead_of(name: &str) -> &'static str {
    if name.starts_with("nccl") {
        "NCCL's device code has no function of this name: `nccl_device::raw` lists all"
    } else if name.starts_with("__nv_") {
        "it is of CUDA's libdevice, which is not linked: `cuda_std::math` and `GpuFloat` have such \
         functions"
    } else if name.starts_with("nvshmem") {
        "NVSHMEM is not linked: `nccl_device` has puts, signals and barriers"
    } else if name.starts_with("cuda") || name.starts_with("cu") {
        "a function of the CUDA runtime or driver runs on the host"
    } else {
        "kernels are linked with NCCL's device code and Rust's `core`: write the function in Rust, \
         or find its like in `cuda_std`"
    }
}

/// Fails on what the GPU has no code for, where LLVM would abort without a line.
fn check_supported(module: &Module<'_>) -> Result<()> {
    let mut faults = Vec::new();
    for function in module.functions() {
        for instruction in function.instructions() {
            if let Some(what) = instruction.unsupported() {
                let place = instruction.place().unwrap_or_else(|| "a line unknown".to_owned());
                faults.push(format!("`{}` at {place}: {what}", demangled(&function.name())));
            }
        }
    }
    faults.dedup();
    if faults.is_empty() { Ok(()) } else { Err(Failure(faults.join("\n"))) }
}

/// Returns the functions that use a symbol, with their lines, for messages.
fn users(module: &Module<'_>, name: &str) -> String {
    let mut users = Vec::new();
    for function in module.functions() {
        for instruction in function.instructions() {
            if instruction.operands().iter().any(|operand| operand.name() == name) {
                let place = instruction.place().map_or(String::new(), |at| format!(" at {at}"));
                users.push(format!("`{}`{place}", demangled(&function.name())));
            }
        }
    }
    users.dedup();
    if users.is_empty() { "a static".to_owned() } else { users.join(", ") }
}

fn dump(module: &Module<'_>, job: &Link, stage: &str) -> Result<()> {
    let path = |folder: &Path| folder.join(format!("{}.{stage}.ll", job.file));
    job.dump.as_deref().map_or(Ok(()), |folder| module.print(&path(folder)))
}
