//! Checks the PTX of the shipped kernels and the resources that `ptxas` reports for them.
//!
//! The harness is libtest-mimic, for two reasons: `main` must call `link_worker` first, as the
//! kernel builder also starts this program as its worker process; and a running test can report
//! that it was skipped.

mod exported;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use cuda_builder::{Artifacts, Callee, CalleeKind, CudaBuilder, Error, KernelReport, NvvmArch};
use devcomm_kernels as kernels;
use devcomm_kernels::gemm::gemm_swapped::{M8N64, M64N128, Shape};
use devcomm_types::nccl::GinDescriptorSmem;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

use exported::exported;

/// A block size that every kernel must support.
const THREADS: u32 = 512;

/// Maximum bytes of stack of a GIN operation: the size of NCCL's request descriptor.
const DESCRIPTOR: usize = size_of::<GinDescriptorSmem>();

fn main() {
    cuda_builder::link_worker();
    let tests = vec![
        trial("ptx_has_exactly_the_exported_kernels", false, exported_alone),
        trial("kernels_call_only_gin_operations", false, call_only_gin),
        trial("kernels_load_no_tables", false, load_no_tables),
        trial("collectives_wait_before_they_let_the_next_begin", false, wait_before_they_launch),
        trial("kernels_keep_everything_in_registers", true, keep_registers),
        trial("kernels_run_with_512_threads", true, run_with_512_threads),
        trial("products_of_tensor_cores_overlap", true, products_overlap),
        trial("collectives_have_the_room_that_their_plans_count_on", true, have_room),
        trial("kernels_are_as_good_on_blackwell", true, as_good_on_blackwell),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit();
}

static BUILT: LazyLock<Result<Artifacts, Error>> = LazyLock::new(|| {
    CudaBuilder::new("devcomm-kernels")
        .manifest_dir(env!("CARGO_MANIFEST_DIR"))
        .out_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels"))
        .build()
});

/// Returns a test of the built kernels; if `assembled`, it needs `ptxas`. Skipped if a component is
/// missing.
fn trial(name: &str, assembled: bool, test: fn(&Artifacts) -> Result<(), Failed>) -> Trial {
    Trial::ignorable_test(name, move || {
        if assembled && let Err(error) = devcomm_locate::find_ptxas() {
            return missing(error.to_string());
        }
        match &*BUILT {
            Ok(artifacts) => test(artifacts).map(|()| Completion::Completed),
            Err(error) if error.is_missing_part() => missing(error.to_string()),
            Err(error) => Err(error.into()),
        }
    })
}

/// Skips a test that cannot run; with `DEVCOMM_REQUIRE_KERNELS=1` it fails.
fn missing(reason: String) -> Result<Completion, Failed> {
    if std::env::var_os("DEVCOMM_REQUIRE_KERNELS").is_some_and(|value| value == "1") {
        return Err(format!("DEVCOMM_REQUIRE_KERNELS is set, and {reason}").into());
    }
    Ok(Completion::ignored_with(format!("SKIPPED: {reason}")))
}

fn exported_alone(artifacts: &Artifacts) -> Result<(), Failed> {
    let mut entries = BTreeSet::new();
    let mut declared = BTreeSet::new();
    let exported = exported();
    for module in &artifacts.modules {
        let ptx = fs::read_to_string(&module.ptx)?;
        let of_ptx = ptx.lines().filter_map(|line| line.split_once(".entry "));
        entries.extend(of_ptx.map(|(_, rest)| rest.trim_end_matches('(').to_owned()));
        let kernels = module.info.kernels.iter();
        declared.extend(kernels.map(|k| (k.name.clone(), k.file.clone(), k.params.len())));
    }
    let names: BTreeSet<_> = exported.iter().map(|entry| entry.name.clone()).collect();
    let wanted: BTreeSet<_> = exported
        .iter()
        .map(|entry| (entry.name.clone(), entry.file.to_owned(), entry.params))
        .collect();
    ensure(entries == names, || format!("the PTX has {entries:?}, wanted {names:?}"))?;
    ensure(declared == wanted, || format!("the sidecars have {declared:?}, wanted {wanted:?}"))
}

/// A kernel that may run concurrently with those of other objects waits for the previous launch
/// before it lets the next one begin, so that at most two launches of an object are on the GPU,
/// except in a branch, which is for objects that are alone. The kernel that does neither is
/// launched when the previous one has ended.
fn wait_before_they_launch(artifacts: &Artifacts) -> Result<(), Failed> {
    let mut checked = 0;
    for module in &artifacts.modules {
        let ptx = fs::read_to_string(&module.ptx)?;
        for entry in ptx.split(".entry ").skip(1) {
            let name = entry.split('(').next().unwrap_or_default();
            let at = |what| entry.find(what);
            if let Some((kernel, _)) = room_of(name) {
                let is_apart = *kernel == "lsa_allreduce" && at("griddepcontrol").is_none();
                let mut launches = entry.match_indices("griddepcontrol.launch_dependents");
                let first = launches.find(|(launch, _)| !is_skipped(entry, *launch));
                let order = at("griddepcontrol.wait").zip(first.map(|(launch, _)| launch));
                ensure(is_apart || order.is_some_and(|(wait, launch)| wait < launch), || {
                    format!("{name} lets the next launch begin before it waits: {order:?}")
                })?;
                checked += 1;
            }
        }
    }
    ensure(checked >= kernels::collectives::room::ALL.len(), || format!("{checked} kernels"))
}

/// Returns whether a branch skips what stands at `launch`, to the block with the wait, which comes
/// next.
fn is_skipped(entry: &str, launch: usize) -> bool {
    let (before, after) = entry.split_at(launch);
    let Some((_, rest)) = after.split_once("$L__BB") else { return false };
    let Some((label, block)) = rest.split_once(':') else { return false };
    let block = block.split("$L__BB").next().unwrap_or_default();
    let skips = |line: &str| line.contains("bra") && line.ends_with(&format!("$L__BB{label};"));
    block.contains("griddepcontrol.wait") && before.lines().any(skips)
}

/// Returns the kernel that this one is an instance of, and its room on a multiprocessor.
fn room_of(name: &str) -> Option<&'static (&'static str, u32)> {
    kernels::collectives::room::ALL.iter().find(|(kernel, _)| {
        let types = name.strip_prefix(kernel);
        types.is_some_and(|types| types.is_empty() || types.starts_with('_'))
    })
}

/// All functions are inlined in a kernel, except GIN operations, and the function that ends the
/// kernel when an assertion in one of them fails.
fn call_only_gin(artifacts: &Artifacts) -> Result<(), Failed> {
    each_kernel(artifacts, |kernel, gin| {
        let may_call = |callee: &Callee| match callee.kind() {
            CalleeKind::GinOperation => callee.stack <= DESCRIPTOR,
            CalleeKind::Assertion => true,
            CalleeKind::Other => false,
        };
        let calls = if gin { kernel.callees.iter().all(may_call) } else { kernel.calls == 0 };
        calls && kernel.call_prototypes == 0
    })
}

/// LLVM may turn a `match` into a table in global memory, and a load from it costs a short kernel
/// up to a tenth of its time.
fn load_no_tables(artifacts: &Artifacts) -> Result<(), Failed> {
    for module in &artifacts.modules {
        let ptx = fs::read_to_string(&module.ptx)?;
        let table = ptx.lines().find(|line| line.contains("switch_$_table"));
        ensure(table.is_none(), || format!("{}: {}", module.file, table.unwrap_or_default()))?;
    }
    Ok(())
}

/// The stack that `ptxas` reports for a GIN kernel includes that of the operations it calls.
fn keep_registers(artifacts: &Artifacts) -> Result<(), Failed> {
    each_kernel(artifacts, keeps_registers)
}

fn keeps_registers(kernel: &KernelReport, gin: bool) -> bool {
    let stack_is_empty = |stack| kernel.own_stack == 0 && (gin || stack == 0);
    kernel
        .resources
        .is_some_and(|r| stack_is_empty(r.stack) && r.spill_stores == 0 && r.spill_loads == 0)
}

/// `ptxas` reports when it serializes the `wgmma`s of a kernel.
fn products_overlap(artifacts: &Artifacts) -> Result<(), Failed> {
    each_kernel(artifacts, |kernel, _| kernel.resources.is_some_and(|r| !r.serialized))
}

/// A multiprocessor of sm_90 has four parts, each with 16384 registers, of which a warp takes a
/// multiple of 8 for each thread; and 228 KiB of shared memory, of which a block takes 1 KiB more
/// than it asks for.
fn have_room(artifacts: &Artifacts) -> Result<(), Failed> {
    /// Launches on the GPU at a time: of each of four objects, one that runs and one that waits.
    const LAUNCHES: u32 = 8;
    let mut found = BTreeSet::new();
    each_kernel(artifacts, |kernel, _| {
        let Some((name, room)) = room_of(&kernel.name) else { return true };
        found.insert(*name);
        kernel.resources.is_some_and(|resources| {
            let warps = 16384 / (32 * resources.registers.next_multiple_of(8));
            *room <= (4 * warps * 32).min(2048)
                && LAUNCHES * (resources.static_shared + 1024) <= 228 << 10
        })
    })?;
    let all = kernels::collectives::room::ALL.len();
    ensure(found.len() == all, || format!("{} of {all} kernels: {found:?}", found.len()))
}

fn run_with_512_threads(artifacts: &Artifacts) -> Result<(), Failed> {
    each_kernel(artifacts, |kernel, _| runs_with_512_threads(kernel))
}

fn is_tiled(name: &str) -> bool {
    name.starts_with("gemm_swapped") || name.starts_with("gemm_unswapped")
}

/// Requires of a kernel with a fixed block size to support that size instead.
fn runs_with_512_threads(kernel: &KernelReport) -> bool {
    let wanted = match &*kernel.name {
        name if name.starts_with("gemm_allreduce_mma") => {
            kernels::gemm_allreduce::gemm_allreduce_mma::THREADS
        }
        name if name.starts_with("gemm_mma") || name.starts_with("gemm_grouped_mma") => {
            kernels::gemm::gemm_mma::THREADS
        }
        name if is_tiled(name) && name.ends_with("N64") => M8N64::THREADS,
        name if is_tiled(name) => M64N128::THREADS,
        name if name.starts_with("gemm_blocks") => kernels::gemm::gemm_wgmma::THREADS,
        name if ["allgather_gemm", "gemm_allreduce_two_shot", "gemm_reduce_scatter_wide"]
            .iter()
            .any(|wide| name.starts_with(wide)) =>
        {
            kernels::gemm::gemm_wgmma::THREADS
        }
        name if name.starts_with("gemm_allreduce_wide") => kernels::gemm::gemm_wgmma::THREADS,
        name if name.starts_with("gemm_allreduce_swapped") => M64N128::THREADS,
        name if name.starts_with("gemm_wgmma") || name.starts_with("gemm_grouped") => {
            kernels::gemm::gemm_wgmma::THREADS
        }
        _ => THREADS,
    };
    kernel.max_threads.is_some_and(|threads| threads >= wanted)
}

/// The driver of a newer GPU assembles the shipped PTX; modules bound to one architecture do not
/// run there.
fn as_good_on_blackwell(artifacts: &Artifacts) -> Result<(), Failed> {
    let modules = artifacts.modules.iter().filter(|module| !module.is_bound());
    let kernels: usize = modules.map(|module| module.info.kernels.len()).sum();
    let reports = artifacts.report_on(NvvmArch::Compute100)?;
    ensure(reports.len() == kernels, || format!("{} reports, {kernels} kernels", reports.len()))?;
    each_report(&reports, |kernel, gin| {
        keeps_registers(kernel, gin) && runs_with_512_threads(kernel)
    })
}

/// Fails with the reports of the kernels that are not `good`, or if a kernel has no report. The
/// second argument of `good` is whether the kernel uses GIN.
fn each_kernel(
    artifacts: &Artifacts,
    good: impl FnMut(&KernelReport, bool) -> bool,
) -> Result<(), Failed> {
    let reports = artifacts.report()?;
    ensure(reports.len() == exported().len(), || format!("{} reports", reports.len()))?;
    each_report(&reports, good)
}

fn each_report(
    reports: &[KernelReport],
    mut good: impl FnMut(&KernelReport, bool) -> bool,
) -> Result<(), Failed> {
    let exported = exported();
    let gin = |kernel: &KernelReport| exported.iter().any(|e| e.gin && e.name == kernel.name);
    let bad: Vec<_> = reports.iter().filter(|kernel| !good(kernel, gin(kernel))).collect();
    ensure(bad.is_empty(), || format!("{bad:#?}"))
}

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), Failed> {
    if condition { Ok(()) } else { Err(message().into()) }
}
