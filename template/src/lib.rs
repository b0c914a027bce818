//! Launches the kernels.

use devcomm::{DevCommRequirements, Error, KernelSet, Rank};
use kernels::sum_of_all;

/// The compiled kernels.
#[cfg(feature = "ptx")]
pub static KERNELS: KernelSet = devcomm::include_kernels!();
/// No compiled kernels: simulated GPUs need none.
#[cfg(not(feature = "ptx"))]
pub static KERNELS: KernelSet = devcomm::WITHOUT_PTX;

/// The number of blocks of a launch.
const BLOCKS: u32 = 4;

/// Returns the element-wise sum of every rank's `input`, which has the same length on every rank.
///
/// # Errors
///
/// If a rank is lost, memory is exhausted, or the GPUs do not reach each other's memory.
pub fn sum_over_ranks(rank: &Rank, input: &[f32]) -> Result<Vec<f32>, Error> {
    rank.load(&KERNELS)?;
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    // The kernel adds up the inputs of the ranks of its LSA team only.
    comm.require_single_lsa_team()?;
    let send = comm.window::<f32>(input.len())?;
    let out = comm.window::<f32>(input.len())?;
    let dev = comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(BLOCKS))?;
    stream.copy_to_device(input, &send)?;
    let launch = sum_of_all::args(&dev, &send, &out).grid(BLOCKS);
    launch.block(128).launch(&stream)?;
    let mut sums = vec![0.0; input.len()];
    stream.copy_to_host(&out, &mut sums)?;
    Ok(sums)
}
