//! Programs of products of matrices.

use devcomm::{
    AllGatherGemm, AllGatherGemmPlan, Buffer, F8E4M3, Gemm, GemmAllReducePlan, GemmOptions,
    GemmPlan, GroupedGemm, Result, RowGroups, Wire,
};
use devcomm_testing::simulated::Gpu;
use half::bf16;

use super::LAUNCHES;

/// Runs a product twice, by the plan that `is_planned` accepts.
fn products(
    gpu: &Gpu<'_>,
    shape: [usize; 3],
    is_planned: impl Fn(&GemmPlan) -> bool,
) -> Result<()> {
    let [m, n, k] = shape;
    let (a, b) = (gpu.buffer(&vec![bf16::ONE; m * k])?, gpu.buffer(&vec![bf16::ONE; n * k])?);
    let c = gpu.buffer(&vec![bf16::ZERO; m * n])?;
    let stream = gpu.stream()?;
    let gemm = Gemm::new(&stream)?;
    let plan = gemm.plans(shape)?.into_iter().find(is_planned).expect("the plan exists");
    gemm.set_plan(shape, plan)?;
    (0..2).try_for_each(|_| gemm.launch(&a, &b, &c, shape))?;
    stream.synchronize()
}

pub fn gemm_wgmma(gpu: &Gpu<'_>) -> Result<()> {
    products(gpu, [130, 520, 328], |plan| *plan == GemmPlan::Wide)
}

pub fn gemm_swapped(gpu: &Gpu<'_>) -> Result<()> {
    let splits =
        |plan: &GemmPlan| matches!(plan, GemmPlan::Swapped(tiling) if tiling.cluster.splits == 2);
    products(gpu, [16, 264, 648], splits)
}

pub fn gemm_sliced(gpu: &Gpu<'_>) -> Result<()> {
    products(gpu, [130, 80, 1544], |plan| plan.to_string() == "unswapped:128x80:1:1x1:2")
}

/// Computes two tiles in two rounds, each by the four blocks of a cluster, of which there is one.
pub fn gemm_unswapped(gpu: &Gpu<'_>) -> Result<()> {
    products(gpu, [128, 160, 648], |plan| plan.to_string() == "unswapped:128x80:4")
}

pub fn gemm_blocks(gpu: &Gpu<'_>) -> Result<()> {
    let shape @ [m, n, k] = [130, 136, 784];
    let one = F8E4M3::from_f32(1.0);
    let (a, b) = (gpu.buffer(&vec![one; m * k])?, gpu.buffer(&vec![one; n * k])?);
    let blocks = k.div_ceil(128);
    let (of_a, of_b) =
        (gpu.buffer(&vec![1_f32; blocks * m])?, gpu.buffer(&vec![1_f32; 2 * blocks])?);
    let (c, stream) = (gpu.buffer(&vec![bf16::ZERO; m * n])?, gpu.stream()?);
    let gemm = Gemm::new(&stream)?;
    (0..2).try_for_each(|_| gemm.product(shape).block_scales(&of_a, &of_b).launch(&a, &b, &c))?;
    stream.synchronize()
}

/// Multiplies A by B, and the product by B again, which overwrites A.
pub fn gemm_after_gemm(gpu: &Gpu<'_>) -> Result<()> {
    let shape @ [m, n, k] = [16, 264, 264];
    let (a, b) = (gpu.buffer(&vec![bf16::ONE; m * k])?, gpu.buffer(&vec![bf16::ONE; n * k])?);
    let (c, stream) = (gpu.buffer(&vec![bf16::ZERO; m * n])?, gpu.stream()?);
    let gemm = Gemm::new(&stream)?;
    let swapped = |plan: &GemmPlan| matches!(plan, GemmPlan::Swapped(_));
    gemm.set_plan(shape, gemm.plans(shape)?.into_iter().find(swapped).expect("the plan exists"))?;
    gemm.launch(&a, &b, &c, shape)?;
    gemm.launch(&c, &b, &a, shape)?;
    stream.synchronize()
}

/// Multiplies two groups by B, and the products by B again, so that the second launch reads what
/// the first one writes.
pub fn gemm_grouped_swapped(gpu: &Gpu<'_>) -> Result<()> {
    const N: usize = 136;
    let rows = gpu.buffer(&vec![bf16::ONE; 12 * N])?;
    let (between, c) =
        (gpu.buffer(&vec![bf16::ZERO; 12 * N])?, gpu.buffer(&vec![bf16::ZERO; 12 * N])?);
    let (b, stream) = (gpu.buffer(&vec![bf16::ONE; 2 * N * N])?, gpu.stream()?);
    let (offsets, sizes) = (gpu.buffer(&[0_u32, 8])?, gpu.buffer(&[8_u32, 4])?);
    let groups = RowGroups { offsets: offsets.device_slice(), sizes: sizes.device_slice() };
    let gemm = GroupedGemm::new(&stream)?;
    gemm.launch(&rows, &b, &between, &groups, [12, N, N], None)?;
    gemm.launch(&between, &b, &c, &groups, [12, N, N], None)?;
    stream.synchronize()
}

pub fn gemm_mma(gpu: &Gpu<'_>) -> Result<()> {
    products(gpu, [70, 136, 264], |plan| *plan == GemmPlan::Portable)
}

fn gemm_allreduces(gpu: &Gpu<'_>, wire: Wire) -> Result<()> {
    // Two tiles, and more steps than stages of the pipeline.
    let shape = [130, 40, 136];
    let [m, n, k] = shape;
    let (a, b) = (gpu.buffer(&vec![bf16::ONE; m * k])?, gpu.buffer(&vec![bf16::ONE; n * k])?);
    let (c, stream) = (gpu.window(&vec![bf16::ZERO; m * n])?, gpu.stream()?);
    let gemm = GemmOptions::new().wire(wire).build(gpu.communicator()?, &stream, m, n)?;
    gemm.set_plan(Some(GemmAllReducePlan::Strips))?;
    (0..LAUNCHES).try_for_each(|_| gemm.launch(&a, &b, &c, shape))?;
    stream.synchronize()
}

pub fn gemm_allreduce_mma(gpu: &Gpu<'_>) -> Result<()> {
    gemm_allreduces(gpu, Wire::Bf16)
}

pub fn gemm_allreduce_e4m3(gpu: &Gpu<'_>) -> Result<()> {
    gemm_allreduces(gpu, Wire::E4m3)
}

fn wide_gemm_allreduces(gpu: &Gpu<'_>, wire: Wire) -> Result<()> {
    // There are two tiles: while the first one is sent, steps of the second one are left.
    let shape = [9, 264, 392];
    let [m, n, k] = shape;
    let (a, b) = (gpu.buffer(&vec![bf16::ONE; m * k])?, gpu.buffer(&vec![bf16::ONE; n * k])?);
    let (c, stream) = (gpu.window(&vec![bf16::ZERO; m * n])?, gpu.stream()?);
    let gemm = GemmOptions::new().wire(wire).build(gpu.communicator()?, &stream, m, n)?;
    gemm.set_plan(Some(GemmAllReducePlan::Wide))?;
    (0..2).try_for_each(|_| gemm.launch(&a, &b, &c, shape))?;
    stream.synchronize()
}

pub fn gemm_allreduce_wide(gpu: &Gpu<'_>) -> Result<()> {
    wide_gemm_allreduces(gpu, Wire::Bf16)
}

pub fn gemm_allreduce_wide_f8(gpu: &Gpu<'_>) -> Result<()> {
    wide_gemm_allreduces(gpu, Wire::E4m3)
}

pub fn allgather_gemm(gpu: &Gpu<'_>) -> Result<()> {
    // Some tiles have rows of one rank, and one has rows of both.
    let shape = [264, 8, 16];
    let [m, n, k] = shape;
    let (a, b) = (gpu.buffer(&vec![bf16::ONE; m / 2 * k])?, gpu.buffer(&vec![bf16::ONE; n * k])?);
    let (c, stream) = (gpu.buffer(&vec![bf16::ZERO; m * n])?, gpu.stream()?);
    let gemm = AllGatherGemm::new(gpu.communicator()?, &stream, m, k)?;
    gemm.set_plan(Some(AllGatherGemmPlan::Fused))?;
    (0..LAUNCHES).try_for_each(|_| gemm.launch(&a, &b, &c, shape))?;
    stream.synchronize()
}
