//! The guide's kernels compile for GPUs, and stay in registers.
//!
//! The harness is libtest-mimic: `main` calls `link_worker` first, as the kernel builder also
//! starts this program as its worker process.

use std::fs;
use std::path::Path;

use cuda_builder::{CalleeKind, CudaBuilder, Error, KernelReport};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

fn main() {
    cuda_builder::link_worker();
    let registers = || {
        let reports = builder("guide").build().and_then(|made| made.report());
        ended(reports, |reports| stay_in_registers(reports))
    };
    let messages = || {
        let ptx = |builder: CudaBuilder| Ok(builder.only("panic").build()?.modules.remove(0).ptx);
        let built = ptx(builder("silent"))
            .and_then(|silent| Ok((silent, ptx(builder("messages").panic_messages(true))?)));
        ended(built, |(silent, messages)| {
            say_what_failed(&fs::read_to_string(silent)?, &fs::read_to_string(messages)?)
        })
    };
    let trials = vec![
        Trial::ignorable_test("the_kernels_of_the_guide_have_no_stack_and_no_calls", registers),
        Trial::ignorable_test("panics_have_messages_on_request_and_cost_nothing_without", messages),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn builder(folder: &str) -> CudaBuilder {
    CudaBuilder::new("devcomm-guide-kernels")
        .manifest_dir(env!("CARGO_MANIFEST_DIR"))
        .out_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder))
}

/// Checks what a build has made; a test that lacks a component is skipped.
fn ended<T>(
    built: Result<T, Error>,
    check: impl FnOnce(&T) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    match built {
        Ok(made) => check(&made).map(|()| Completion::Completed),
        Err(error) if error.is_missing_part() => skip(error.to_string()),
        Err(error) => Err(error.to_string().into()),
    }
}

/// Checks that kernels have no stack and no calls. GIN's operations and printing are exceptions.
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

/// Checks that the message, its file, and the variable that the host sets to the rank (initially
/// `u32::MAX`) are in the PTX with messages, and that the silent PTX has none of them.
fn say_what_failed(silent: &str, messages: &str) -> Result<(), Failed> {
    let bytes =
        |text: &str| text.bytes().map(|byte| byte.to_string()).collect::<Vec<_>>().join(", ");
    let parts = [
        bytes("the table has 40 entries"),
        bytes("docs/guide/kernels/src/mistakes.rs"),
        "vprintf".to_owned(),
        " DEVCOMM_RANK[4] = {255, 255, 255, 255};".to_owned(),
    ];
    for part in parts {
        if !messages.contains(&part) || silent.contains(&part) {
            let (with, without) = (messages.contains(&part), silent.contains(&part));
            return Err(format!("{part}: {with} with messages, {without} without").into());
        }
    }
    Ok(())
}

/// Skips a test that lacks a component; with `DEVCOMM_REQUIRE_KERNELS=1` the test fails.
fn skip(reason: String) -> Result<Completion, Failed> {
    match std::env::var_os("DEVCOMM_REQUIRE_KERNELS").is_some_and(|value| value == "1") {
        true => Err(reason.into()),
        false => Ok(Completion::ignored_with(format!("SKIPPED: {reason}"))),
    }
}
