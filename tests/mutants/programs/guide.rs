//! Programs that run the guide's fused kernels.

use devcomm::device::Everyone;
use devcomm::{
    DevCommRequirements, DevCommResource, Element, LamportMemory, LaunchConfig, Result,
    SymmetricBuffer, TensorMap, TensorMapDesc,
};
use devcomm_testing::simulated::Gpu;
use guide_kernels::few::{self, product_all_reduce_few};
use guide_kernels::wide::{self, product_all_reduce_wide};
use half::bf16;

const RANKS: usize = 2;

/// Returns the memory of messages, and a device communicator.
fn exchange(gpu: &Gpu<'_>, capacity: u32) -> Result<(LamportMemory, DevCommResource)> {
    let memory = LamportMemory::new(gpu.communicator()?, capacity)?;
    Ok((memory, gpu.dev_comm(DevCommRequirements::new())?))
}

/// Returns a matrix of ones, and its map with tiles of `tile_rows` rows.
fn ones(
    gpu: &Gpu<'_>,
    rows: usize,
    columns: usize,
    tile_rows: u32,
) -> Result<(SymmetricBuffer<bf16>, TensorMap)> {
    let matrix = gpu.buffer(&vec![bf16::ONE; rows * columns])?;
    let (address, data_type) = (matrix.device_address(), bf16::DATA_TYPE);
    let (rows, columns) = (rows as u32, columns as u32);
    let desc = TensorMapDesc { address, rows, columns, tile_rows, data_type };
    Ok((matrix, gpu.context().tensor_map(&desc)?))
}

pub fn guide_few(gpu: &Gpu<'_>) -> Result<()> {
    // Two tiles, one after the other.
    let [m, n, k] = [8, 72, 72];
    let capacity = few::slots(m, n).unwrap();
    let (memory, dev) = exchange(gpu, capacity)?;
    let (_a, map_a) = ones(gpu, m, k, few::TILE.0)?;
    let (_b, map_b) = ones(gpu, n, k, few::TILE.1)?;
    let (_c, map_c) = ones(gpu, m, n, few::TILE.0)?;
    let stream = gpu.stream()?;
    let config = LaunchConfig::new(1, few::THREADS);
    let config = config.with_dynamic_shared(few::Memory::BYTES).with_dependent();
    let [m, n, k] = [m as u32, n as u32, k as u32];
    for _ in 0..2 {
        let launch =
            product_all_reduce_few::<RANKS>::args(&dev, map_a, map_b, map_c, &memory, m, n, k);
        // SAFETY: the kernel's contract: all ranks launch the same.
        unsafe { launch.config(config).launch(&stream)? };
    }
    stream.synchronize()
}

pub fn guide_wide(gpu: &Gpu<'_>) -> Result<()> {
    // Two tiles, one after the other: idle warps add to the first one.
    let [m, n, k] = [9, 264, 392];
    let capacity = Everyone::slots(m, n).unwrap();
    let (memory, dev) = exchange(gpu, capacity)?;
    let (_a, map_a) = ones(gpu, m, k, wide::TILE.0)?;
    let (_b, map_b) = ones(gpu, n, k, wide::HALF)?;
    let (c, map_c) = ones(gpu, m, n, wide::STORE_M)?;
    let stream = gpu.stream()?;
    let config = LaunchConfig::new(2, wide::THREADS);
    let config = config.with_dynamic_shared(wide::Memory::BYTES).with_dependent();
    let [m, n, k] = [m as u32, n as u32, k as u32];
    for _ in 0..2 {
        let launch =
            product_all_reduce_wide::<RANKS>::args(&dev, map_a, map_b, map_c, &c, &memory, m, n, k);
        // SAFETY: the kernel's contract: all ranks launch the same.
        unsafe { launch.config(config).launch(&stream)? };
    }
    stream.synchronize()
}
