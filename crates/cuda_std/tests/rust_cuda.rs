//! Kernels in Rust-CUDA's style: compiled to PTX, assembled, and run in the simulator.
//!
//! The test harness is libtest-mimic, for two reasons: `CudaBuilder` starts this program again as a
//! process that runs LLVM, so `main` must call `link_worker` first; and a test can report at run
//! time that it was skipped.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use cuda_builder::{Artifacts, CudaBuilder, Error};
use devcomm::{Result, Simulation};
use devcomm_testing::simulated::{Gpu, read, run, world};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use rust_cuda_kernels::{matrix_product, vector_add, warp_sum};

fn main() {
    cuda_builder::link_worker();
    let tests = vec![
        ptx("a_slice_is_one_parameter_of_16_bytes", false, slices_are_16_bytes),
        ptx("statics_of_the_shared_address_space_are_shared_memory", false, shared_statics),
        ptx("kernels_for_rust_cuda_assemble_without_a_stack", true, assemble),
        Trial::test("vectors_are_added", adds_vectors),
        Trial::test("each_block_has_its_own_tiles", multiplies_matrices),
        Trial::test("warps_sum_up", sums_warps),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit();
}

static BUILT: LazyLock<Result<Artifacts, Error>> = LazyLock::new(|| {
    CudaBuilder::new("rust-cuda-kernels")
        .manifest_dir(env!("CARGO_MANIFEST_DIR"))
        .out_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join("rust-cuda-kernels"))
        .build()
});

/// Returns a test of the built PTX. It is skipped if a part of the toolchain is missing: ptxas for
/// a test with `assembled`.
fn ptx(name: &str, assembled: bool, test: fn(&Artifacts) -> Result<(), Failed>) -> Trial {
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

/// Returns the PTX of a kernel's module.
fn module(artifacts: &Artifacts, kernel: &str) -> Result<String, Failed> {
    let module = artifacts.modules.iter().find(|module| module.file == kernel);
    Ok(fs::read_to_string(&module.ok_or("the kernel was not built")?.ptx)?)
}

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), Failed> {
    if condition { Ok(()) } else { Err(message().into()) }
}

fn slices_are_16_bytes(artifacts: &Artifacts) -> Result<(), Failed> {
    let ptx = module(artifacts, "vector_add")?;
    for i in [0, 1] {
        let wanted = format!(".param .align 8 .b8 vector_add_param_{i}[16]");
        ensure(ptx.contains(&wanted), || format!("no {wanted} in\n{ptx}"))?;
    }
    // The length follows the address.
    ensure(ptx.contains("[vector_add_param_0+8]"), || format!("no length is read in\n{ptx}"))
}

fn shared_statics(artifacts: &Artifacts) -> Result<(), Failed> {
    let ptx = module(artifacts, "matrix_product")?;
    let arrays = ptx.lines().filter(|line| line.contains(".shared .align"));
    let bytes = arrays.filter(|line| line.contains("[1024]")).count();
    ensure(bytes == 2, || format!("{bytes} arrays of 1,024 bytes in\n{ptx}"))?;
    let accesses = ["ld.shared", "st.shared"].map(|access| ptx.contains(access));
    ensure(accesses == [true; 2], || format!("the arrays are not used in\n{ptx}"))
}

fn assemble(artifacts: &Artifacts) -> Result<(), Failed> {
    let report = artifacts.report()?;
    ensure(report.len() == 3, || format!("{report:?}"))?;
    for kernel in report {
        let used = kernel.resources.ok_or("the kernel was not assembled")?;
        ensure(used.stack == 0 && used.spill_stores == 0, || format!("{kernel:?}"))?;
    }
    Ok(())
}

/// Runs `body` on one simulated GPU.
fn on_gpu<T: Send>(body: impl Fn(&Gpu<'_>) -> Result<T> + Sync) -> Result<T, Failed> {
    let mut results = run(&world(Simulation::new(1)), body)?;
    Ok(results.remove(0))
}

fn adds_vectors() -> Result<(), Failed> {
    let (a, b): (Vec<f32>, Vec<f32>) = (0..1000).map(|i| (i as f32, (7 * i % 13) as f32)).unzip();
    let sums = on_gpu(|gpu| {
        // The output is longer than the slices; the kernel leaves its other elements unchanged.
        let sums = gpu.buffer(&[-1.0_f32; 1024])?;
        gpu.launch(vector_add::args(&gpu.buffer(&a)?, &gpu.buffer(&b)?, &sums).grid(8).block(128))?;
        read(&sums)
    })?;
    let wanted: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).chain([-1.0; 24]).collect();
    ensure(sums == wanted, || "the sums are wrong".to_owned())
}

fn multiplies_matrices() -> Result<(), Failed> {
    let (rows, columns, inner) = (37, 50, 21);
    let a: Vec<f32> = (0..rows * inner).map(|i| (i % 7) as f32 - 3.0).collect();
    let b: Vec<f32> = (0..inner * columns).map(|i| (i % 5) as f32).collect();
    let product = on_gpu(|gpu| {
        let out = gpu.buffer(&vec![f32::NAN; rows * columns])?;
        let (a, b) = (gpu.buffer(&a)?, gpu.buffer(&b)?);
        let product = matrix_product::args(&a, &b, &out, rows, columns, inner);
        gpu.launch(product.grid(12).block(256))?;
        read(&out)
    })?;
    let element = |i: usize| {
        let (row, column) = (i / columns, i % columns);
        (0..inner).map(|k| a[row * inner + k] * b[k * columns + column]).sum::<f32>()
    };
    let wanted: Vec<f32> = (0..rows * columns).map(element).collect();
    ensure(product == wanted, || "the product is wrong".to_owned())
}

fn sums_warps() -> Result<(), Failed> {
    let values: Vec<f32> = (0..700).map(|i| (i % 11) as f32).collect();
    let sums = on_gpu(|gpu| {
        // One sum per block. The last block's threads beyond the slice's end add 0.
        let sums = gpu.buffer(&[0_f32; 3])?;
        gpu.launch(warp_sum::args(&gpu.buffer(&values)?, &sums).grid(3).block(256))?;
        read(&sums)
    })?;
    let wanted: Vec<f32> = values.chunks(256).map(|chunk| chunk.iter().sum()).collect();
    ensure(sums == wanted, || format!("{sums:?} instead of {wanted:?}"))
}
