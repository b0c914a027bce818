//! The PTX of reduce-copy: no calls, no stack, 16-byte accesses.
//!
//! The harness is libtest-mimic: `CudaBuilder` starts this program again as its worker process, so
//! `main` must call `link_worker` first, and a test can report at run time that it was skipped.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use cuda_builder::{Artifacts, CudaBuilder, Error, KernelReport};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

fn main() {
    cuda_builder::link_worker();
    let tests = vec![
        trial("reduce_copy_calls_nothing", false, calls_nothing),
        trial("reduce_copy_keeps_everything_in_registers", true, keeps_registers),
        trial("reduce_copy_runs_with_512_threads", true, runs_with_512_threads),
        trial("vectors_move_by_16_bytes", false, vectors_move_by_16_bytes),
        trial("loads_of_a_step_are_in_flight_at_once", false, loads_come_first),
        trial("the_switch_moves_16_bytes", false, the_switch_moves_16_bytes),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit();
}

static BUILT: LazyLock<Result<Artifacts, Error>> = LazyLock::new(|| {
    CudaBuilder::new("reduce-copy-kernels")
        .manifest_dir(env!("CARGO_MANIFEST_DIR"))
        .out_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join("reduce-copy-kernels"))
        .build()
});

/// Returns a test of the built PTX. It is skipped if a part of the toolchain is missing: ptxas for
/// a test with `assembled`.
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

/// Skips the test; with `DEVCOMM_REQUIRE_KERNELS=1`, fails it.
fn missing(reason: String) -> Result<Completion, Failed> {
    if std::env::var_os("DEVCOMM_REQUIRE_KERNELS").is_some_and(|value| value == "1") {
        return Err(format!("DEVCOMM_REQUIRE_KERNELS is set, and {reason}").into());
    }
    Ok(Completion::ignored_with(format!("SKIPPED: {reason}")))
}

/// Returns the lines of a kernel's body.
fn body(artifacts: &Artifacts, kernel: &str) -> Result<Vec<String>, Failed> {
    for module in &artifacts.modules {
        let ptx = fs::read_to_string(&module.ptx)?;
        if let Some((_, rest)) = ptx.split_once(&format!(".entry {kernel}(")) {
            let body = rest.split_once("\n}").ok_or("the kernel has no end")?.0;
            return Ok(body.lines().map(|line| line.trim().to_owned()).collect());
        }
    }
    Err(format!("there is no kernel {kernel}").into())
}

fn count(body: &[String], what: &str) -> usize {
    body.iter().filter(|line| line.starts_with(what)).count()
}

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), Failed> {
    if condition { Ok(()) } else { Err(message().into()) }
}

/// Returns whether the kernel contains no NCCL code.
fn is_without_nccl(kernel: &KernelReport) -> bool {
    kernel.file != "nccl"
}

fn calls_nothing(artifacts: &Artifacts) -> Result<(), Failed> {
    for kernel in artifacts.report()? {
        ensure(kernel.calls == 0 && kernel.call_prototypes == 0, || format!("{kernel:?}"))?;
        if is_without_nccl(&kernel) {
            let body = body(artifacts, &kernel.name)?;
            let local = body.iter().any(|line| line.contains(".local"));
            ensure(!local, || format!("{} uses local memory", kernel.name))?;
        }
    }
    Ok(())
}

fn keeps_registers(artifacts: &Artifacts) -> Result<(), Failed> {
    for kernel in artifacts.report()?.into_iter().filter(is_without_nccl) {
        let used = kernel.resources.ok_or("the kernel was not assembled")?;
        let spills = used.spill_stores + used.spill_loads;
        ensure(used.stack == 0 && spills == 0, || format!("{kernel:?}"))?;
    }
    Ok(())
}

fn runs_with_512_threads(artifacts: &Artifacts) -> Result<(), Failed> {
    for kernel in artifacts.report()?.into_iter().filter(is_without_nccl) {
        ensure(kernel.max_threads >= Some(512), || format!("{kernel:?}"))?;
    }
    Ok(())
}

/// Checks that elements of every type move by 16-byte accesses.
fn vectors_move_by_16_bytes(artifacts: &Artifacts) -> Result<(), Failed> {
    let reduces = ["reduce_f32", "reduce_F8E4M3", "reduce_f64", "reduce_u8", "local_reduce_f16"];
    let copies = ["copy_f32", "copy_f16", "copy_u8", "local_copy_f32", "reduce_copy_bf16"];
    for kernel in reduces.into_iter().chain(copies) {
        let body = body(artifacts, kernel)?;
        let wide = ["v4.b32", "v2.b64", "v4.f32", "v2.f64"];
        let moves = |what: &str| {
            let wide = |line: &&String| wide.iter().any(|form| line.contains(form));
            body.iter().filter(|line| line.starts_with(what)).filter(wide).count()
        };
        ensure(moves("ld.") > 0 && moves("st.") > 0, || format!("{kernel} has no 16-byte access"))?;
    }
    Ok(())
}

/// Checks that twelve loads, of six vectors of two ranks each, precede the first store.
fn loads_come_first(artifacts: &Artifacts) -> Result<(), Failed> {
    let body = body(artifacts, "reduce_f32")?;
    let (mut longest, mut run) = (0, 0);
    for line in &body {
        if line.starts_with("ld.") && line.contains(".v4") {
            run += 1;
            longest = longest.max(run);
        } else if line.starts_with("st.") || line.contains("bra") {
            run = 0;
        }
    }
    ensure(longest == 12, || format!("{longest} loads are in flight"))
}

fn the_switch_moves_16_bytes(artifacts: &Artifacts) -> Result<(), Failed> {
    let loads = [
        ("multimem_reduce_f32", "multimem.ld_reduce.weak.add.v4.f32"),
        ("multimem_reduce_f16", "multimem.ld_reduce.weak.add.acc::f32.v4.f16x2"),
        ("multimem_reduce_bf16", "multimem.ld_reduce.weak.add.acc::f32.v4.bf16x2"),
        ("multimem_reduce_copy_f32", "multimem.st.weak.v4.f32"),
        ("multimem_copy_u8", "multimem.st.weak.v4.f32"),
        ("lsa_reduce_multimem_copy_bf16", "multimem.st.weak.v4.f32"),
        ("multimem_reduce_lsa_copy_f16", "multimem.ld_reduce.weak.max.v4.f16x2"),
    ];
    for (kernel, instruction) in loads {
        let body = body(artifacts, kernel)?;
        ensure(count(&body, instruction) >= 8, || format!("{kernel} has too few {instruction}"))?;
    }
    // Single bytes are stored by 32-bit AND and OR, which leave the word's other bytes unchanged.
    let body = body(artifacts, "multimem_copy_u8")?;
    let reds = ["multimem.red.relaxed.sys.and.b32", "multimem.red.relaxed.sys.or.b32"];
    ensure(reds.iter().all(|red| count(&body, red) > 0), || "no single elements".to_owned())
}
