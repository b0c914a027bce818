//! Checks the PTX of a kernel with and without debug checks, and of launch attributes; the PTX and
//! the machine code of tiles; and what `ptxas` reports for the products of `docs/gemm.md`.
//!
//! The harness is libtest-mimic, for two reasons: `main` must call `link_worker` first, as the
//! kernel builder also starts this program as its worker process; and a running test can report
//! that it was skipped.

use std::fs;
use std::path::Path;

use cuda_builder::{Artifacts, CudaBuilder, Error, KernelReport, ModuleArtifact, NvvmArch};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use object::{Object, ObjectSection};

fn main() {
    cuda_builder::link_worker();
    let messages = || {
        let kernel =
            |folder| builder(folder, "devcomm-example-kernels", "ll_alltoall").assemble(false);
        let (checked, plain) = (build(kernel("checked").debug(true)), build(kernel("plain")));
        let (checked, plain) = match (checked, plain) {
            (Ok(checked), Ok(plain)) => (ptx(&checked)?, ptx(&plain)?),
            (Err(error), _) | (_, Err(error)) => return missing(&error),
        };
        says_what_went_wrong(&checked, &plain).map(|()| Completion::Completed)
    };
    let attributes = || {
        let kernels = builder("launches", "devcomm-device-test-kernels", "launches");
        match build(kernels.assemble(false)) {
            Ok(module) => uses_the_instructions(&ptx(&module)?).map(|()| Completion::Completed),
            Err(error) => missing(&error),
        }
    };
    let tiles = || match build(builder("tiles", "devcomm-device-test-kernels", "tiles")) {
        Ok(module) => {
            folds_to_what_one_writes_by_hand(&ptx(&module)?)?;
            assembles_to_what_one_writes_by_hand(&module)
        }
        Err(error) => missing(&error),
    };
    let ladder = || match artifacts("ladder", "devcomm-gemm-ladder-kernels") {
        Ok(artifacts) => assembled(artifacts.report(), stay_in_registers),
        Err(error) => missing(&error),
    };
    let examples = || match artifacts("examples", "devcomm-example-kernels") {
        Ok(artifacts) => {
            load_no_tables(&artifacts)?;
            assembled(artifacts.report(), run_with_512_threads)?;
            // The driver of a newer GPU assembles the same PTX.
            assembled(artifacts.report_on(NvvmArch::Compute100), run_with_512_threads)
        }
        Err(error) => missing(&error),
    };
    let own = || {
        let kernels = builder("epilogue", "devcomm-device-test-kernels", "epilogue");
        match build(kernels.assemble(false)) {
            Ok(module) => check_own_entry_only(&ptx(&module)?).map(|()| Completion::Completed),
            Err(error) => missing(&error),
        }
    };
    let exchange = || {
        let kernels = builder("tile_exchange", "devcomm-device-test-kernels", "tile_exchange");
        match build(kernels) {
            Ok(module) => pushes_tiles(&module),
            Err(error) => missing(&error),
        }
    };
    let trials = vec![
        Trial::ignorable_test(
            "kernels_with_checks_say_what_went_wrong_and_others_carry_no_messages",
            messages,
        ),
        Trial::ignorable_test("clusters_and_dependent_launches_have_their_ptx", attributes),
        Trial::ignorable_test("a_pipeline_of_tiles_is_what_one_writes_by_hand", tiles),
        Trial::ignorable_test("the_ladders_kernels_stay_in_registers", ladder),
        Trial::ignorable_test("the_examples_kernels_run_with_512_threads_in_registers", examples),
        Trial::ignorable_test("a_kernel_around_a_shipped_body_keeps_it_in_registers", own),
        Trial::ignorable_test("a_tile_is_pushed_before_its_flag_is_set", exchange),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// Builds a package's kernel file.
fn builder(folder: &str, package: &str, file: &str) -> CudaBuilder {
    CudaBuilder::new(package)
        .manifest_dir(env!("CARGO_MANIFEST_DIR"))
        .out_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder))
        .only(file)
}

/// Returns the builder's only module.
fn build(builder: CudaBuilder) -> Result<ModuleArtifact, Error> {
    Ok(builder.build()?.modules.remove(0))
}

fn ptx(module: &ModuleArtifact) -> Result<String, Failed> {
    Ok(fs::read_to_string(&module.ptx)?)
}

/// Builds all kernels of a package.
fn artifacts(folder: &str, package: &str) -> Result<Artifacts, Error> {
    CudaBuilder::new(package)
        .manifest_dir(env!("CARGO_MANIFEST_DIR"))
        .out_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder))
        .build()
}

/// Checks what `ptxas` reports; skipped without it.
fn assembled(
    reports: Result<Vec<KernelReport>, Error>,
    check: fn(&[KernelReport]) -> Result<(), Failed>,
) -> Result<Completion, Failed> {
    match reports {
        Ok(reports) if reports.iter().any(|kernel| kernel.resources.is_none()) => {
            skip("there is no ptxas".to_owned())
        }
        Ok(reports) => check(&reports).map(|()| Completion::Completed),
        Err(error) => missing(&error),
    }
}

/// Checks that no kernel loads a table from global memory, which LLVM may make of a `match`.
fn load_no_tables(artifacts: &Artifacts) -> Result<(), Failed> {
    for module in &artifacts.modules {
        if ptx(module)?.contains("switch_$_table") {
            return Err(format!("{} loads a table", module.file).into());
        }
    }
    Ok(())
}

/// Checks that the kernels stay in registers, and that a block may have 512 threads.
fn run_with_512_threads(reports: &[KernelReport]) -> Result<(), Failed> {
    stay_in_registers(reports)?;
    match reports.iter().find(|kernel| kernel.max_threads.is_none_or(|threads| threads < 512)) {
        None => Ok(()),
        Some(kernel) => Err(format!("{kernel:#?}").into()),
    }
}

/// Checks that kernels have no spills, no stack and no calls but those of GIN's operations, and
/// that `ptxas` does not serialise the `wgmma`s.
fn stay_in_registers(reports: &[KernelReport]) -> Result<(), Failed> {
    let good = |kernel: &KernelReport| {
        let calls_gin = kernel.uses_gin();
        let is_lean = kernel.resources.is_some_and(|resources| {
            // The stack that `ptxas` reports includes that of the operations.
            kernel.own_stack == 0
                && (calls_gin || resources.stack == 0)
                && resources.spill_stores + resources.spill_loads == 0
                && !resources.serialized
        });
        is_lean && (calls_gin || kernel.calls == 0)
    };
    match !reports.is_empty() && reports.iter().all(good) {
        true => Ok(()),
        false => Err(format!("{reports:#?}").into()),
    }
}

/// Skips a test that lacks a component; any other error fails it.
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

/// Returns the PTX of a kernel.
fn body<'a>(ptx: &'a str, kernel: &str) -> Result<&'a str, Failed> {
    let start = ptx.find(&format!(".entry {kernel}(")).ok_or(format!("no entry {kernel}"))?;
    let (body, _) = ptx[start..].split_once("\n}").ok_or(format!("{kernel} has no end"))?;
    Ok(body)
}

/// Checks that the tile layer has the same barriers, copies and products as the code by hand, and
/// no more instructions in all.
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

/// Checks that the tile layer has no more machine instructions than the code by hand, and no more
/// registers. Without `ptxas` it is skipped.
fn assembles_to_what_one_writes_by_hand(module: &ModuleArtifact) -> Result<Completion, Failed> {
    let Some(cubin) = &module.cubin else {
        return skip("there is no ptxas".to_owned());
    };
    let cubin = fs::read(cubin)?;
    let cubin = object::File::parse(&*cubin)?;
    let measure = |name: &str| -> Result<_, Failed> {
        let code = cubin.section_by_name(&format!(".text.{name}")).ok_or("no machine code")?;
        let kernel = module.info.kernels.iter().find(|kernel| kernel.name == name);
        let resources = kernel.and_then(|kernel| kernel.resources).ok_or("no resources")?;
        // An instruction has 16 bytes.
        Ok((code.size() / 16, resources.registers))
    };
    let (tiles, hand) = (measure("pipeline_of_tiles")?, measure("pipeline_by_hand")?);
    if tiles.0 > hand.0 || tiles.1 > hand.1 {
        let text = format!("instructions and registers: {tiles:?} with tiles, {hand:?} by hand");
        return Err(text.into());
    }
    Ok(Completion::Completed)
}

/// Returns whether a line of PTX is an instruction, not a directive, a label or a comment.
fn is_instruction(line: &str) -> bool {
    let line = line.trim_start();
    line.ends_with(';') && !line.starts_with(['.', '/'])
}

/// Checks that the kernels of the package that has the body are not compiled.
fn check_own_entry_only(ptx: &str) -> Result<(), Failed> {
    let entries: Vec<&str> = ptx.lines().filter(|line| line.contains(".entry")).collect();
    let own = entries.len() == 1 && entries[0].contains("product_of_ones_own");
    match own && ptx.contains("mma.sync") && !ptx.contains(".local") && !ptx.contains("call") {
        true => Ok(()),
        false => Err(format!("{entries:?}, or calls, or local memory").into()),
    }
}

/// Checks that tiles are pushed by a bulk copy; all of the product stays in registers.
fn pushes_tiles(module: &ModuleArtifact) -> Result<Completion, Failed> {
    let instructions = [
        "mma.sync",
        "fence.proxy.async.shared::cta",
        "cp.async.bulk.global.shared::cta.bulk_group",
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group 0",
        "st.release.sys",
        "ld.acquire.sys",
    ];
    check_order(&ptx(module)?, "product_and_sum", &instructions)?;
    let reports: Vec<_> = module.info.kernels.iter().map(|kernel| kernel.resources).collect();
    match reports[..] {
        [Some(resources)] if resources.stack + resources.spill_stores == 0 => {
            Ok(Completion::Completed)
        }
        [None] => skip("there is no ptxas".to_owned()),
        _ => Err(format!("{reports:?}").into()),
    }
}

/// Checks that a kernel has these instructions, in this order.
fn check_order(ptx: &str, kernel: &str, instructions: &[&str]) -> Result<(), Failed> {
    let body = body(ptx, kernel)?;
    let mut rest = body;
    for instruction in instructions {
        let Some((_, after)) = rest.split_once(instruction) else {
            return Err(format!("{kernel} has no {instruction} there:\n{body}").into());
        };
        rest = after;
    }
    Ok(())
}

/// Checks that the kernels in `launches.rs` have their instructions.
fn uses_the_instructions(ptx: &str) -> Result<(), Failed> {
    for (kernel, instructions) in [
        (
            "passes_on",
            &["%cluster_nctarank", "mapa.shared::cluster.u32", "st.shared::cluster.v4.f32"][..],
        ),
        ("pairs_pass_on", &[".reqnctapercluster 2", "st.shared::cluster.v4.f32"]),
        ("sums_clusters", &[".maxntid 512", ".minnctapersm 1", "st.async.weak.shared::cluster"]),
        ("writes_late", &["griddepcontrol.launch_dependents;", "st.global"]),
        ("adds", &["griddepcontrol.launch_dependents;", "griddepcontrol.wait;", "ld.global"]),
        ("adds_tile_bf16", &["cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group"]),
        (
            "stores_transposed",
            &[
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
                "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16",
            ],
        ),
    ] {
        check_order(ptx, kernel, instructions)?;
    }
    Ok(())
}

/// Checks that a kernel with debug checks has their messages, and that one without stops silently.
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
