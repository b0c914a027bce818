//! The guide's kernels compile for GPUs, and stay in registers.
//!
//! The harness is libtest-mimic: `main` calls `link_worker` first, as the kernel builder also
//! starts this program as its worker process.

use std::path::Path;

use cuda_builder::{CalleeKind, CudaBuilder, Error, KernelReport};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

fn main() {
    cuda_builder::link_worker();
    let name = "the_kernels_of_the_guide_have_no_stack_and_no_calls";
    let trial = Trial::ignorable_test(name, || match reports() {
        Ok(reports) => stay_in_registers(&reports).map(|()| Completion::Completed),
        Err(error) if error.is_missing_part() => skip(error.to_string()),
        Err(error) => Err(error.to_string().into()),
    });
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
}

fn reports() -> Result<Vec<KernelReport>, Error> {
    CudaBuilder::new("devcomm-guide-kernels")
        .manifest_dir(env!("CARGO_MANIFEST_DIR"))
        .out_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join("guide"))
        .build()?
        .report()
}

/// But for GIN's operations, and for printing.
fn stay_in_registers(reports: &[KernelReport]) -> Result<(), Failed> {
    let is_good = |kernel: &&KernelReport| {
        let has_stack = kernel.resources.is_some_and(|used| {
            used.spill_stores + used.spill_loads > 0 || (!kernel.uses_gin() && used.stack > 0)
        });
        let calls = kernel.callees.iter().any(|callee| callee.kind() == CalleeKind::Other);
        !has_stack && !calls
    };
    let bad: Vec<_> = reports.iter().filter(|one| one.name != "hello" && !is_good(one)).collect();
    match reports.len() >= 20 && bad.is_empty() {
        true => Ok(()),
        false => Err(format!("{} kernels; {bad:#?}", reports.len()).into()),
    }
}

/// A test that lacks a component is skipped; with `DEVCOMM_REQUIRE_KERNELS=1` it fails.
fn skip(reason: String) -> Result<Completion, Failed> {
    match std::env::var_os("DEVCOMM_REQUIRE_KERNELS").is_some_and(|value| value == "1") {
        true => Err(reason.into()),
        false => Ok(Completion::ignored_with(format!("SKIPPED: {reason}"))),
    }
}
