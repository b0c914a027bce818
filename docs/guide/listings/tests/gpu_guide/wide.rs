//! The fused product at Hopper's speed.

use devcomm::device::{Everyone, Lamport, lamport_words};
use devcomm::{
    DevCommRequirements, Element, Error, LaunchConfig, Rank, SymmetricBuffer, TensorMapDesc,
};
use half::bf16;
use kernels::wide::{HALF, SHARED, STORE_M, THREADS, TILE, product_all_reduce_wide};
use norm::KERNELS;

/// Tiles that are cut off in each direction, and terms that do not fill the last stage.
const M: usize = 150;
const N: usize = 264;
const K: usize = 72;

/// Whole numbers from -2 to 2, so that sums are exact.
fn elements(rank: usize, matrix: usize, count: usize) -> Vec<f32> {
    let first = 10_000_019 * rank + 1_000_003 * matrix;
    let mixed = (first..first + count).map(|i| (i as u32).wrapping_mul(2_654_435_761) >> 24);
    mixed.map(|bits| bits as f32 % 5.0 - 2.0).collect()
}

/// Each rank's product, rounded.
fn product_of(rank: usize) -> Vec<f32> {
    let (a, b) = (elements(rank, 0, M * K), elements(rank, 1, N * K));
    let element = |i: usize| -> f32 {
        let (row, column) = (&a[i / N * K..][..K], &b[i % N * K..][..K]);
        row.iter().zip(column).map(|(a, b)| a * b).sum()
    };
    (0..M * N).map(|i| bf16::from_f32(element(i)).to_f32()).collect()
}

#[devcomm::test(ranks = 2)]
fn a_wide_product_is_added_in_both_ranks(rank: &Rank) -> Result<(), Error> {
    const RANKS: usize = 2;
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    comm.require_single_lsa_team()?;
    let buffer = |elements: Vec<f32>| {
        let elements: Vec<bf16> = elements.into_iter().map(bf16::from_f32).collect();
        let buffer = comm.mem_alloc::<bf16>(elements.len())?;
        buffer.copy_from_host(&elements)?;
        Ok::<_, Error>(buffer)
    };
    let a = buffer(elements(rank.rank(), 0, M * K))?;
    let b = buffer(elements(rank.rank(), 1, N * K))?;
    let c = comm.mem_alloc::<bf16>(M * N)?;
    let [m, n, k] = [M as u32, N as u32, K as u32];
    let map = |matrix: &SymmetricBuffer<bf16>, rows, columns, tile_rows| {
        let (address, data_type) = (matrix.device_address(), bf16::DATA_TYPE);
        rank.context().tensor_map(&TensorMapDesc { address, rows, columns, tile_rows, data_type })
    };
    let maps = [map(&a, m, k, TILE.0)?, map(&b, n, k, HALF)?, map(&c, m, n, STORE_M)?];
    let capacity = Everyone::slots(M, N).unwrap();
    let slots = comm.window::<u32>(lamport_words(RANKS, capacity as usize))?;
    let state = comm.mem_alloc::<u32>(Lamport::<RANKS>::STATE)?;
    stream.fill(&slots, devcomm::device::EMPTY)?;
    stream.fill(&state, 0)?;
    stream.synchronize()?;
    let dev = comm.create_dev_comm(DevCommRequirements::new())?;
    rank.barrier()?;
    let parts: Vec<Vec<f32>> = (0..RANKS).map(product_of).collect();
    let sum = |i: usize| bf16::from_f32(parts.iter().map(|part| part[i]).sum());
    let right: Vec<bf16> = (0..M * N).map(sum).collect();
    // A cluster computes two tiles. The banks of slots take turns.
    let config = LaunchConfig::new(2, THREADS).with_dynamic_shared(SHARED);
    for _ in 0..3 {
        stream.fill(&c, bf16::NAN)?;
        let [map_a, map_b, map_c] = maps;
        let launch = product_all_reduce_wide::<RANKS>::args(
            &dev, map_a, map_b, map_c, &c, &slots, &state, capacity, m, n, k,
        );
        // SAFETY: the kernel's contract: all ranks launch the same.
        unsafe { launch.config(config).launch(&stream)? };
        let mut found = vec![bf16::ZERO; M * N];
        stream.copy_to_host(&c, &mut found)?;
        let wrong = found.iter().zip(&right).position(|(found, right)| found != right);
        assert_eq!(wrong, None, "the first element of C that is wrong");
    }
    Ok(())
}
