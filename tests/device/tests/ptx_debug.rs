//! Checks the PTX of a kernel with and without debug checks.
//!
//! The harness is libtest-mimic, for two reasons: `main` must call `link_worker` first, as the
//! kernel builder also starts this program as its worker process; and a running test can report
//! that it was skipped.

use std::fs;
use std::path::Path;

use cuda_builder::{CudaBuilder, Error};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

fn main() {
    cuda_builder::link_worker();
    let test = || {
        let (checked, plain) = match (build(true), build(false)) {
            (Ok(checked), Ok(plain)) => (checked, plain),
            (Err(error), _) | (_, Err(error)) => return missing(&error),
        };
        says_what_went_wrong(&checked, &plain).map(|()| Completion::Completed)
    };
    let name = "kernels_with_checks_say_what_went_wrong_and_others_carry_no_messages";
    libtest_mimic::run(&Arguments::from_args(), vec![Trial::ignorable_test(name, test)]).exit();
}

/// The PTX of a kernel, with debug checks or without.
fn build(debug: bool) -> Result<String, Error> {
    let folder = if debug { "checked" } else { "plain" };
    let artifacts = CudaBuilder::new("devcomm-kernels")
        .manifest_dir(env!("CARGO_MANIFEST_DIR"))
        .out_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder))
        .debug(debug)
        .only("ll_alltoall")
        .assemble(false)
        .build()?;
    Ok(fs::read_to_string(&artifacts.modules[0].ptx).expect("the PTX that was just built"))
}

/// A test that cannot run is skipped; with `DEVCOMM_REQUIRE_KERNELS=1` it fails.
fn missing(error: &Error) -> Result<Completion, Failed> {
    let required = std::env::var_os("DEVCOMM_REQUIRE_KERNELS").is_some_and(|value| value == "1");
    if required || !error.is_missing_part() {
        return Err(error.to_string().into());
    }
    Ok(Completion::ignored_with(format!("SKIPPED: {error}")))
}

fn says_what_went_wrong(checked: &str, plain: &str) -> Result<(), Failed> {
    let message = "the elements do not fit the session's slots";
    let bytes: Vec<String> = message.bytes().map(|byte| byte.to_string()).collect();
    let in_ptx = |ptx: &str| ptx.contains(&bytes.join(", ")) || ptx.contains(message);
    if !in_ptx(checked) || !checked.contains("vprintf") {
        return Err("the checked kernels have no message".into());
    }
    if in_ptx(plain) || plain.contains("vprintf") {
        return Err("the plain kernels carry messages".into());
    }
    if !plain.contains("trap") && !plain.contains("exit") {
        return Err("the plain kernels do not stop at a violated rule".into());
    }
    Ok(())
}
