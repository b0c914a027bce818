//! What the shipped kernels are compiled to.
//!
//! The harness is libtest-mimic: this program is also the builder's worker and must reach `link_worker` first, and a test
//! can say while it runs that it was skipped.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use cuda_builder::{Artifacts, CudaBuilder, Error, KernelReport, NvvmArch};
use devcomm::{Kernel, kernels};
use devcomm_types::KernelArgs;
use half::{bf16, f16};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// The largest block that a kernel must be able to run with.
const THREADS: u32 = 512;

/// A kernel, as the crate exports it: entry, file, number of parameters.
type Exported = (&'static str, &'static str, usize);

/// Every kernel that `devcomm_kernels` exports.
fn exported() -> BTreeSet<Exported> {
    fn of<K: Kernel>(_kernel: K) -> Exported {
        (K::NAME, K::FILE, K::Args::LEN)
    }
    BTreeSet::from([
        of(kernels::lsa_allreduce::<f32>),
        of(kernels::lsa_allreduce::<f16>),
        of(kernels::lsa_allreduce::<bf16>),
    ])
}

fn main() {
    cuda_builder::link_worker();
    let tests = vec![
        Trial::ignorable_test("ptx_has_exactly_the_exported_kernels", || {
            with_artifacts(&HOPPER, ptx_has_exactly_the_exported_kernels)
        }),
        Trial::ignorable_test("kernels_call_nothing", || {
            with_artifacts(&HOPPER, kernels_call_nothing)
        }),
        Trial::ignorable_test("kernels_keep_everything_in_registers", || {
            with_assembled(&HOPPER, kernels_keep_everything_in_registers)
        }),
        Trial::ignorable_test("kernels_run_with_512_threads", || {
            with_assembled(&HOPPER, kernels_run_with_512_threads)
        }),
        Trial::ignorable_test("kernels_are_as_good_on_blackwell", || {
            with_assembled(&BLACKWELL, |artifacts| {
                kernels_call_nothing(artifacts)?;
                kernels_keep_everything_in_registers(artifacts)?;
                kernels_run_with_512_threads(artifacts)
            })
        }),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit();
}

type Built = LazyLock<Result<Artifacts, Error>>;

/// The architecture that the crate ships.
static HOPPER: Built = LazyLock::new(|| build(NvvmArch::Compute90));
static BLACKWELL: Built = LazyLock::new(|| build(NvvmArch::Compute100));

fn build(arch: NvvmArch) -> Result<Artifacts, Error> {
    CudaBuilder::new("devcomm-kernels")
        .arch(arch)
        .manifest_dir(env!("CARGO_MANIFEST_DIR"))
        .out_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels").join(arch.name()))
        .build()
}

/// Runs a test on what was built, or says what is missing for it.
fn with_artifacts(
    built: &Built,
    test: impl FnOnce(&Artifacts) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    match &**built {
        Ok(artifacts) => test(artifacts).map(|()| Completion::Completed),
        Err(error) if error.is_missing_part() => missing(error.to_string()),
        Err(error) => Err(error.into()),
    }
}

/// The same for a test of what `ptxas` makes of the PTX.
fn with_assembled(
    built: &Built,
    test: impl FnOnce(&Artifacts) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    match devcomm_locate::find_ptxas() {
        Ok(_) => with_artifacts(built, test),
        Err(error) => missing(error.to_string()),
    }
}

/// A test that cannot run is skipped; where a whole environment is asked for, that is a failure.
fn missing(reason: String) -> Result<Completion, Failed> {
    if std::env::var_os("DEVCOMM_REQUIRE_KERNELS").is_some_and(|value| value == "1") {
        return Err(format!("DEVCOMM_REQUIRE_KERNELS is set, and {reason}").into());
    }
    Ok(Completion::ignored_with(format!("SKIPPED: {reason}")))
}

fn ptx_has_exactly_the_exported_kernels(artifacts: &Artifacts) -> Result<(), Failed> {
    let mut entries = BTreeSet::new();
    let mut declared = BTreeSet::new();
    for module in &artifacts.modules {
        let ptx = fs::read_to_string(&module.ptx)?;
        let of_ptx = ptx.lines().filter_map(|line| line.split_once(".entry "));
        entries.extend(of_ptx.map(|(_, rest)| rest.trim_end_matches('(').to_owned()));
        let kernels = module.info.kernels.iter();
        declared.extend(kernels.map(|k| (k.name.clone(), k.file.clone(), k.params.len())));
    }
    let names: BTreeSet<_> = exported().iter().map(|(name, ..)| name.to_string()).collect();
    let wanted: BTreeSet<_> = exported()
        .iter()
        .map(|(name, file, len)| (name.to_string(), file.to_string(), *len))
        .collect();
    ensure(entries == names, || format!("the PTX has {entries:?}, wanted {names:?}"))?;
    ensure(declared == wanted, || format!("the sidecars have {declared:?}, wanted {wanted:?}"))
}

fn kernels_call_nothing(artifacts: &Artifacts) -> Result<(), Failed> {
    each_kernel(artifacts, |kernel| kernel.calls == 0 && kernel.call_prototypes == 0)
}

fn kernels_keep_everything_in_registers(artifacts: &Artifacts) -> Result<(), Failed> {
    each_kernel(artifacts, |kernel| {
        kernel.resources.is_some_and(|r| r.stack == 0 && r.spill_stores == 0 && r.spill_loads == 0)
    })
}

fn kernels_run_with_512_threads(artifacts: &Artifacts) -> Result<(), Failed> {
    each_kernel(artifacts, |kernel| kernel.max_threads.is_some_and(|threads| threads >= THREADS))
}

/// Fails with the reports of the kernels that are not as wanted, or when there is no kernel.
fn each_kernel(artifacts: &Artifacts, good: impl Fn(&KernelReport) -> bool) -> Result<(), Failed> {
    let reports = artifacts.report()?;
    ensure(reports.len() == exported().len(), || format!("{} kernels", reports.len()))?;
    let bad: Vec<_> = reports.iter().filter(|kernel| !good(kernel)).collect();
    ensure(bad.is_empty(), || format!("{bad:#?}"))
}

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), Failed> {
    if condition { Ok(()) } else { Err(message().into()) }
}
