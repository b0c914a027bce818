//! The fused products at Hopper's speed.

use devcomm::device::Everyone;
use devcomm::{
    DevCommRequirements, DevCommResource, Element, Error, LamportMemory, LaunchConfig, Rank,
    Stream, SymmetricBuffer, TensorMap, TensorMapDesc,
};
use half::bf16;
use kernels::few::product_all_reduce_few;
use kernels::wide::product_all_reduce_wide;
use kernels::{few, wide};
use norm::KERNELS;

const RANKS: usize = 2;

/// The rows and columns of C, and the terms.
type Shape = [usize; 3];

/// The numbers of the matrices.
const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

/// Returns pseudorandom whole numbers from -2 to 2, so that sums are exact.
fn elements(rank: usize, matrix: usize, count: usize) -> Vec<f32> {
    let first = 10_000_019 * rank + 1_000_003 * matrix;
    let mixed = (first..first + count).map(|i| (i as u32).wrapping_mul(2_654_435_761) >> 24);
    mixed.map(|bits| bits as f32 % 5.0 - 2.0).collect()
}

/// Returns the sum of the ranks' products, each of which is rounded.
fn right([m, n, k]: Shape) -> Vec<bf16> {
    let product = |rank| -> Vec<f32> {
        let (a, b) = (elements(rank, A, m * k), elements(rank, B, n * k));
        let element = |i: usize| -> f32 {
            let (row, column) = (&a[i / n * k..][..k], &b[i % n * k..][..k]);
            row.iter().zip(column).map(|(a, b)| a * b).sum()
        };
        (0..m * n).map(|i| bf16::from_f32(element(i)).to_f32()).collect()
    };
    let parts: Vec<Vec<f32>> = (0..RANKS).map(product).collect();
    (0..m * n).map(|i| bf16::from_f32(parts.iter().map(|part| part[i]).sum())).collect()
}

/// What a rank has on its GPU.
struct Gpu<'a> {
    rank: &'a Rank,
    stream: Stream,
    dev: DevCommResource,
    matrices: [SymmetricBuffer<bf16>; 3],
    memory: LamportMemory,
}

impl<'a> Gpu<'a> {
    fn new(rank: &'a Rank, [m, n, k]: Shape, capacity: u32) -> Result<Self, Error> {
        rank.load(&KERNELS)?;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        comm.require_single_lsa_team()?;
        let buffer = |elements: Vec<f32>| -> Result<_, Error> {
            let elements: Vec<bf16> = elements.into_iter().map(bf16::from_f32).collect();
            let buffer = comm.mem_alloc::<bf16>(elements.len())?;
            buffer.copy_from_host(&elements)?;
            Ok(buffer)
        };
        let a = buffer(elements(rank.rank(), A, m * k))?;
        let b = buffer(elements(rank.rank(), B, n * k))?;
        let c = comm.mem_alloc::<bf16>(m * n)?;
        let memory = LamportMemory::new(comm, capacity)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        Ok(Self { rank, stream, dev, matrices: [a, b, c], memory })
    }

    /// Returns a tensor map of a matrix with tiles of this number of rows.
    fn map(
        &self,
        matrix: usize,
        [rows, columns]: [usize; 2],
        tile_rows: u32,
    ) -> Result<TensorMap, Error> {
        let (address, data_type) = (self.matrices[matrix].device_address(), bf16::DATA_TYPE);
        let (rows, columns) = (rows as u32, columns as u32);
        let desc = TensorMapDesc { address, rows, columns, tile_rows, data_type };
        self.rank.context().tensor_map(&desc)
    }

    /// Compares C after each of three launches: the third one uses the first bank of slots again.
    fn check(&self, shape: Shape, launch: impl Fn() -> Result<(), Error>) -> Result<(), Error> {
        let (c, right) = (&self.matrices[C], right(shape));
        for _ in 0..3 {
            self.stream.fill(c, bf16::NAN)?;
            launch()?;
            let mut found = vec![bf16::ZERO; right.len()];
            self.stream.copy_to_host(c, &mut found)?;
            let wrong = found.iter().zip(&right).position(|(found, right)| found != right);
            assert_eq!(wrong, None, "the first element of C that is wrong");
        }
        Ok(())
    }
}

#[devcomm::test(ranks = 2)]
fn a_wide_product_is_added_in_both_ranks(rank: &Rank) -> Result<(), Error> {
    // Tiles that are cut off in each direction, and terms that do not fill the last stage.
    let shape @ [m, n, k] = [150, 264, 72];
    let capacity = Everyone::slots(m, n).unwrap();
    let gpu = Gpu::new(rank, shape, capacity)?;
    let a = gpu.map(A, [m, k], wide::TILE.0)?;
    let b = gpu.map(B, [n, k], wide::HALF)?;
    let c = gpu.map(C, [m, n], wide::STORE_M)?;
    let Gpu { dev, memory, matrices: [.., to], .. } = &gpu;
    // The two blocks are one cluster, and a column has two tiles (128 + 22 rows), one for each
    // block. There are two columns, so each block computes two tiles: while it multiplies the
    // second one, its idle warps add what the peers have sent of the first one.
    let config = LaunchConfig::new(2, wide::THREADS).with_dynamic_shared(wide::Memory::BYTES);
    let [rows, columns, terms] = shape.map(|extent| extent as u32);
    gpu.check(shape, || {
        let launch =
            product_all_reduce_wide::<RANKS>::args(dev, a, b, c, to, memory, rows, columns, terms);
        // SAFETY: the kernel's contract: all ranks launch the same.
        unsafe { launch.config(config).launch(&gpu.stream) }
    })
}

#[devcomm::test(ranks = 2)]
fn a_product_of_few_rows_is_added_in_both_ranks(rank: &Rank) -> Result<(), Error> {
    // Two rows of tiles, of which the second has only 6 of 64 rows, and five columns of tiles, of
    // which the last has only 8 of 64 columns.
    let shape @ [m, n, k] = [70, 264, 136];
    let capacity = few::slots(m, n).unwrap();
    let gpu = Gpu::new(rank, shape, capacity)?;
    let a = gpu.map(A, [m, k], few::TILE.0)?;
    let b = gpu.map(B, [n, k], few::TILE.1)?;
    let c = gpu.map(C, [m, n], few::TILE.0)?;
    let Gpu { dev, memory, .. } = &gpu;
    // Each block computes up to four of ten tiles.
    let config = LaunchConfig::new(3, few::THREADS).with_dynamic_shared(few::Memory::BYTES);
    let [rows, columns, terms] = shape.map(|extent| extent as u32);
    gpu.check(shape, || {
        let launch =
            product_all_reduce_few::<RANKS>::args(dev, a, b, c, memory, rows, columns, terms);
        // SAFETY: the kernel's contract: all ranks launch the same.
        unsafe { launch.config(config).launch(&gpu.stream) }
    })
}
