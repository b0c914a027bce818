//! Checks the PTX of a kernel with and without debug checks, of launch attributes, and of tiles,
//! and what `ptxas` reports for the products of `docs/gemm.md`.
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
    let messages = || {
        let build = |folder, debug| build(folder, "devcomm-kernels", "ll_alltoall", debug);
        let (checked, plain) = match (build("checked", true), build("plain", false)) {
            (Ok(checked), Ok(plain)) => (checked, plain),
            (Err(error), _) | (_, Err(error)) => return missing(&error),
        };
        says_what_went_wrong(&checked, &plain).map(|()| Completion::Completed)
    };
    let attributes = || match build("launches", "devcomm-device-test-kernels", "launches", false) {
        Ok(ptx) => uses_the_instructions(&ptx).map(|()| Completion::Completed),
        Err(error) => missing(&error),
    };
    let tiles = || match build("tiles", "devcomm-device-test-kernels", "tiles", false) {
        Ok(ptx) => folds_to_what_one_writes_by_hand(&ptx).map(|()| Completion::Completed),
        Err(error) => missing(&error),
    };
    let ladder = || match ladder() {
        Ok(reports) if reports.iter().any(|kernel| kernel.resources.is_none()) => {
            skip("there is no ptxas".to_owned())
        }
        Ok(reports) => stay_in_registers(&reports).map(|()| Completion::Completed),
        Err(error) => missing(&error),
    };
    let trials = vec![
        Trial::ignorable_test(
            "kernels_with_checks_say_what_went_wrong_and_others_carry_no_messages",
            messages,
        ),
        Trial::ignorable_test("clusters_and_dependent_launches_have_their_ptx", attributes),
        Trial::ignorable_test("a_pipeline_of_tiles_is_what_one_writes_by_hand", tiles),
        Trial::ignorable_test("the_ladders_kernels_stay_in_registers", ladder),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// The PTX of a package's kernel file, with debug checks or without.
fn build(folder: &str, package: &str, file: &str, debug: bool) -> Result<String, Error> {
    let artifacts = CudaBuilder::new(package)
        .manifest_dir(env!("CARGO_MANIFEST_DIR"))
        .out_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder))
        .debug(debug)
        .only(file)
        .assemble(false)
        .build()?;
    Ok(fs::read_to_string(&artifacts.modules[0].ptx).expect("the PTX that was just built"))
}

/// What `ptxas` reports for the products of `docs/gemm.md`.
fn ladder() -> Result<Vec<cuda_builder::KernelReport>, Error> {
    CudaBuilder::new("devcomm-gemm-ladder-kernels")
        .manifest_dir(env!("CARGO_MANIFEST_DIR"))
        .out_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join("ladder"))
        .build()?
        .report()
}

/// No spills, and `ptxas` does not serialise the `wgmma`s.
fn stay_in_registers(reports: &[cuda_builder::KernelReport]) -> Result<(), Failed> {
    let good = |kernel: &cuda_builder::KernelReport| {
        let of_ptxas = kernel.resources.is_some_and(|resources| {
            resources.stack + resources.spill_stores + resources.spill_loads == 0
                && !resources.serialized
        });
        of_ptxas && kernel.calls == 0
    };
    match !reports.is_empty() && reports.iter().all(good) {
        true => Ok(()),
        false => Err(format!("{reports:#?}").into()),
    }
}

/// A test that lacks a component is skipped.
fn missing(error: &Error) -> Result<Completion, Failed> {
    match error.is_missing_part() {
        true => skip(error.to_string()),
        false => Err(error.to_string().into()),
    }
}

/// Skips a test that cannot run; with `DEVCOMM_REQUIRE_KERNELS=1` it fails.
fn skip(reason: String) -> Result<Completion, Failed> {
    match std::env::var_os("DEVCOMM_REQUIRE_KERNELS").is_some_and(|value| value == "1") {
        true => Err(reason.into()),
        false => Ok(Completion::ignored_with(format!("SKIPPED: {reason}"))),
    }
}

/// The PTX of a kernel.
fn body<'a>(ptx: &'a str, kernel: &str) -> Result<&'a str, Failed> {
    let start = ptx.find(&format!(".entry {kernel}(")).ok_or(format!("no entry {kernel}"))?;
    let (body, _) = ptx[start..].split_once("\n}").ok_or(format!("{kernel} has no end"))?;
    Ok(body)
}

/// The tile layer has the same barriers, copies and products as the code by hand, and no more
/// instructions in all.
fn folds_to_what_one_writes_by_hand(ptx: &str) -> Result<(), Failed> {
    let (tiles, hand) = (body(ptx, "pipeline_of_tiles")?, body(ptx, "pipeline_by_hand")?);
    for instruction in [
        "mbarrier.init",
        "mbarrier.try_wait",
        "mbarrier.arrive.expect_tx",
        "mbarrier.arrive.shared",
        "cp.async.bulk.tensor.2d",
        "wgmma.mma_async",
        "wgmma.wait_group",
        "fence.",
        "bar.sync",
        "call",
        "local",
    ] {
        let count = |body: &str| body.matches(instruction).count();
        if count(tiles) != count(hand) {
            let (tiles, hand) = (count(tiles), count(hand));
            return Err(format!("{instruction}: {tiles} with tiles, {hand} by hand").into());
        }
    }
    let count = |body: &str| body.lines().filter(|line| is_instruction(line)).count();
    if count(tiles) > count(hand) {
        let (tiles, hand) = (count(tiles), count(hand));
        return Err(format!("{tiles} instructions with tiles, {hand} by hand").into());
    }
    Ok(())
}

/// Whether a line of PTX is an instruction, not a directive, a label or a comment.
fn is_instruction(line: &str) -> bool {
    let line = line.trim_start();
    line.ends_with(';') && !line.starts_with(['.', '/'])
}

fn uses_the_instructions(ptx: &str) -> Result<(), Failed> {
    // In this order.
    for (kernel, instructions) in [
        (
            "passes_on",
            &["%cluster_nctarank", "mapa.shared::cluster.u32", "st.shared::cluster.v4.f32"][..],
        ),
        ("pairs_pass_on", &[".reqnctapercluster 2", "st.shared::cluster.v4.f32"]),
        ("writes_late", &["griddepcontrol.launch_dependents;", "st.global"]),
        ("adds", &["griddepcontrol.launch_dependents;", "griddepcontrol.wait;", "ld.global"]),
        (
            "stores_transposed",
            &[
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
                "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16",
            ],
        ),
    ] {
        let body = body(ptx, kernel)?;
        let mut rest = body;
        for instruction in instructions {
            let Some((_, after)) = rest.split_once(instruction) else {
                return Err(format!("{kernel} has no {instruction} there:\n{body}").into());
            };
            rest = after;
        }
    }
    Ok(())
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
