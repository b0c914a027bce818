//! A matrix product that its own kernel adds over the GPUs.

use devcomm::device::Everyone;
use devcomm::{
    DevCommRequirements, DevCommResource, Element, Error, LamportMemory, LaunchConfig, Rank,
    Stream, SymmetricBuffer, TensorMap, TensorMapDesc,
};
use half::bf16;
use kernels::fused::{CLUSTER, HALF, Memory, STORE_M, THREADS, TILE, product_all_reduce_wide};

use crate::KERNELS;

/// The number of ranks: 2, 4 or 8.
pub const RANKS: usize = 2;

/// `C = sum over the ranks of A x B^T`, of bf16, on [`RANKS`] Hopper GPUs that reach each other's
/// memory. A has `m x k` elements, B `n x k`, in each rank its own; C has `m x n`, the same in all
/// ranks. `n` and `k` are multiples of 8.
pub struct FusedProduct {
    dev: DevCommResource,
    memory: LamportMemory,
    blocks: u32,
    maps: [TensorMap; 3],
    shape: [u32; 3],
    /// A and B, whose addresses are in the maps.
    _factors: [SymmetricBuffer<bf16>; 2],
    c: SymmetricBuffer<bf16>,
}

impl FusedProduct {
    /// Prepares products of these matrices. *Collective*: every rank calls this.
    ///
    /// # Errors
    ///
    /// If memory is exhausted, `n` or `k` is no multiple of 8, or the GPUs do not reach each
    /// other's memory.
    ///
    /// # Panics
    ///
    /// If there are not [`RANKS`] ranks, a matrix has another number of elements, or C is so large
    /// that 32 bits do not count its slots.
    pub fn new(
        rank: &Rank,
        [a, b]: [&SymmetricBuffer<bf16>; 2],
        [m, n, k]: [usize; 3],
    ) -> Result<Self, Error> {
        assert_eq!([a.len(), b.len()], [m * k, n * k], "A has m x k elements, and B n x k");
        assert_eq!(rank.n_ranks(), RANKS, "this program is compiled for another number of ranks");
        rank.load(&KERNELS)?;
        let comm = rank.communicator()?;
        comm.require_single_lsa_team()?;
        let capacity = Everyone::slots(m, n).expect("32 bits count the slots");
        let memory = LamportMemory::new(comm, capacity)?;
        let c = comm.mem_alloc(m * n)?;
        let dev = comm.create_dev_comm(DevCommRequirements::new())?;
        let shape @ [rows, columns, terms] = [m, n, k].map(|extent| extent as u32);
        let map = |matrix: &SymmetricBuffer<bf16>, rows, columns, tile_rows| {
            let (address, data_type) = (matrix.device_address(), bf16::DATA_TYPE);
            let desc = TensorMapDesc { address, rows, columns, tile_rows, data_type };
            rank.context().tensor_map(&desc)
        };
        let maps = [
            map(a, rows, terms, TILE.0)?,
            map(b, columns, terms, HALF)?,
            map(&c, rows, columns, STORE_M)?,
        ];
        // The ranks' grids are equal, also if their GPUs differ.
        let gpus = rank.all_gather(&[rank.context().limits().multiprocessors])?.concat();
        let blocks = gpus.into_iter().min().unwrap_or_default() / CLUSTER * CLUSTER;
        Ok(Self { dev, memory, blocks, maps, shape, _factors: [a.clone(), b.clone()], c })
    }

    /// Returns C, which a launch has written.
    pub fn c(&self) -> &SymmetricBuffer<bf16> {
        &self.c
    }

    /// Computes C. *Collective*: every rank calls this, in the same order with its other kernels.
    ///
    /// # Errors
    ///
    /// If a rank is lost, or the kernel does not fit the GPU.
    pub fn launch(&self, stream: &Stream) -> Result<(), Error> {
        let ([a, b, c], [m, n, k]) = (self.maps, self.shape);
        let Self { dev, memory, .. } = self;
        let launch = product_all_reduce_wide::<RANKS>::args(dev, a, b, c, &self.c, memory, m, n, k);
        let config = LaunchConfig::new(self.blocks, THREADS).with_dynamic_shared(Memory::BYTES);
        // SAFETY: the maps, of matrices that `self` keeps, and the slots are those of the shape, by
        // `new`; every rank launches the same, and has a multiprocessor for each block.
        unsafe { launch.config(config).launch(stream) }
    }
}
