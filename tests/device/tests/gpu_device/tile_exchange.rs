//! A test of a product and its sum over the ranks, by a kernel on `TileExchange`.

use cuda_std::bf16;
use devcomm::device::TileExchange;
use devcomm::{DevCommRequirements, LaunchConfig, Rank, Simulation};
use devcomm_device_tests::KERNELS;
use devcomm_device_tests::kernels::{
    self,
    tile_exchange::{ELEMENTS, SHARED, THREADS, TILE},
};
use devcomm_testing::gemm::{Factor, Problem};
use devcomm_testing::machines::Gpus;

/// Returns the element that all ranks get if each rounds its product, and then the sum.
fn rounded_twice(problem: Problem, ranks: usize, (row, column): (usize, usize)) -> bf16 {
    let product = |rank| problem.exact(rank..rank + 1, row, column) as f32;
    let products = (0..ranks).map(|rank| bf16::from_f32(product(rank)).to_f32());
    bf16::from_f32(products.reduce(|sum, product| sum + product).unwrap())
}

/// Checks three successive products of different elements: the banks of slots take turns.
fn sums_products(rank: &Rank) -> Result<(), devcomm::Error> {
    // Two by two tiles, which reach beyond C.
    let [m, n, k] = [130_usize, 134, 40];
    rank.load(&KERNELS)?;
    let (comm, stream, ranks) = (rank.communicator()?, rank.stream()?, rank.n_ranks());
    let dev_comm = comm.create_dev_comm(DevCommRequirements::new())?;
    let tile = TILE as usize;
    let parts = m.div_ceil(tile) * n.div_ceil(tile) * ranks;
    let (inbox, flags) = (comm.window::<bf16>(2 * parts * ELEMENTS)?, comm.window::<u32>(parts)?);
    let state = comm.mem_alloc::<u32>(TileExchange::<bf16>::STATE)?;
    state.fill_bytes(0)?;
    let mut sets = Vec::new();
    for seed in 0..3 {
        let problem = Problem { m, n, k, seed };
        let (a, b) = (comm.mem_alloc::<bf16>(m * k)?, comm.mem_alloc::<bf16>(n * k)?);
        a.copy_from_host(&problem.factor(Factor::A, rank.rank()))?;
        b.copy_from_host(&problem.factor(Factor::B, rank.rank()))?;
        let c = comm.mem_alloc::<bf16>(m * n)?;
        c.fill_bytes(0xff)?;
        sets.push((problem, a, b, c));
    }
    rank.barrier()?;
    let [rows, columns, terms] = [m, n, k].map(|extent| extent as u32);
    for (_, a, b, c) in &sets {
        let launch = kernels::product_and_sum::args(
            &dev_comm, a, b, c, &inbox, &flags, &state, rows, columns, terms,
        );
        let config = LaunchConfig::new(2, THREADS).with_dynamic_shared(SHARED);
        // SAFETY: the matrices and the exchange have room for all tiles; all ranks launch it.
        unsafe { launch.config(config).launch(&stream)? };
    }
    stream.synchronize()?;
    for (problem, _, _, c) in &sets {
        let mut got = vec![bf16::NAN; m * n];
        c.copy_to_host(&mut got)?;
        for position @ (row, column) in problem.all() {
            let right = rounded_twice(*problem, ranks, position);
            assert_eq!(got[row * n + column], right, "{rank:?}, {problem:?}, {position:?}");
        }
    }
    rank.barrier()
}

#[test]
fn tiles_that_ranks_push_to_each_other_are_summed() {
    for ranks in [2, 3] {
        let name = "tiles_that_ranks_push_to_each_other_are_summed";
        let gpus = Gpus::from(Simulation::new(ranks)).with_kernels(&KERNELS);
        gpus.run_seeds(name, 0..2, |rank, _| sums_products(rank));
    }
}
