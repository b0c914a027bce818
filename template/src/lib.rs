//! Launches the kernels.

use devcomm::{DevCommRequirements, DevCommResource, Error, KernelSet, Rank, Stream, Window};
use kernels::sum_of_all;

/// The compiled kernels.
#[cfg(feature = "ptx")]
pub static KERNELS: KernelSet = devcomm::include_kernels!();
/// No compiled kernels: simulated GPUs need none.
#[cfg(not(feature = "ptx"))]
pub static KERNELS: KernelSet = devcomm::WITHOUT_PTX;

/// The number of blocks of a launch.
const BLOCKS: u32 = 4;

/// The element-wise sum of every rank's input, with the memory that its launches use.
pub struct SumOfRanks {
    dev: DevCommResource,
    stream: Stream,
    send: Window<f32>,
    out: Window<f32>,
}

impl SumOfRanks {
    /// Copies `input`, which has the same length on every rank, to the GPU.
    ///
    /// # Errors
    ///
    /// If a rank is lost, memory is exhausted, or the GPUs do not reach each other's memory.
    pub fn new(rank: &Rank, input: &[f32]) -> Result<Self, Error> {
        rank.load(&KERNELS)?;
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        // The kernel adds up the inputs of the ranks of its LSA team only.
        comm.require_single_lsa_team()?;
        let send = comm.window(input.len())?;
        let out = comm.window(input.len())?;
        let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))?;
        stream.copy_to_device(input, &send)?;
        Ok(Self { dev, stream, send, out })
    }

    /// Returns the sum. Every rank calls this.
    ///
    /// # Errors
    ///
    /// If a rank is lost.
    pub fn compute(&self) -> Result<Vec<f32>, Error> {
        let launch = sum_of_all::args(&self.dev, &self.send, &self.out).grid(BLOCKS);
        launch.block(128).launch(&self.stream)?;
        let mut sums = vec![0.0; self.out.len()];
        self.stream.copy_to_host(&self.out, &mut sums)?;
        Ok(sums)
    }
}
