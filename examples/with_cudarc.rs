//! A program that already has cudarc's streams, memory and NCCL communicator, and calls devcomm on
//! them: work of both follows each other in one stream, without a wait of the host.
//!
//! ```text
//! cargo xtask run with_cudarc  # every GPU; LD_LIBRARY_PATH has a folder with a libnccl.so
//! ```
//!
//! cudarc opens NCCL as `libnccl.so`, and NCCL's packages for Python have only `libnccl.so.2`. A
//! symbolic link of that name, to the file that devcomm has opened, lets both use one library.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use devcomm::cudarc::driver::{CudaContext, CudaSlice};
use devcomm::cudarc::nccl::{self, result::NcclError};
use devcomm::{Collectives, DeviceSlice, Rank, ReduceOp, Stream, World};
use devcomm_testing::machines::run;

/// Elements of each array.
const COUNT: usize = 1 << 16;

fn main() -> ExitCode {
    run(World::from_env(), run_rank)
}

/// Runs operations of both libraries on one stream, and checks the sums. The tests call it too.
pub fn run_rank(rank: &Rank) -> Result<()> {
    ensure!(!rank.is_simulated(), "cudarc calls CUDA's driver, and cannot use simulated GPUs");
    let comm = rank.communicator()?; // opens NCCL, and checks the version
    // SAFETY: it opens libnccl.so, whose initialisers have no requirements.
    let found = unsafe { nccl::sys::is_culib_present() };
    let opened = comm.library().path().display();
    ensure!(
        found,
        "cudarc finds no libnccl.so: `mkdir lib && ln -s {opened} lib/libnccl.so`, and add the \
         folder to LD_LIBRARY_PATH"
    );

    // What the program has without devcomm: a stream, memory in it, and a communicator.
    let cuda = CudaContext::new(rank.device())?;
    let stream = cuda.new_stream()?;
    let theirs = nccl::Comm::from_rank(Arc::clone(&stream), rank.rank(), rank.n_ranks(), id(rank)?)
        .map_err(of_nccl("ncclCommInitRank"))?;
    let mut memory = stream.clone_htod(&[1.0_f32; COUNT])?;
    theirs
        .all_reduce_in_place(&mut memory, &nccl::ReduceOp::Sum)
        .map_err(of_nccl("ncclAllReduce"))?;

    // The same stream and memory in devcomm's types, which keep cudarc's alive. The all-reduce of
    // `Collectives` follows cudarc's in the stream, and the copy follows both.
    let memory = Arc::new(memory);
    let ours = Stream::from_cudarc(rank.context(), &stream)?;
    let slice = DeviceSlice::from_cudarc(rank.context(), &memory)?;
    Collectives::new(comm)?.all_reduce(&slice, &slice, ReduceOp::Sum, &ours)?;
    require(&stream.clone_dtoh(&*memory)?, rank.n_ranks().pow(2))?;

    on_one_communicator(rank, &memory, &slice, &ours)
}

/// Adopts a communicator that was made by cudarc. `cudarc::nccl::Comm` does not return its handle;
/// `comm_init_rank`, which it calls, does.
fn on_one_communicator(
    rank: &Rank,
    memory: &Arc<CudaSlice<f32>>,
    slice: &DeviceSlice<f32>,
    stream: &Stream,
) -> Result<()> {
    let (n_ranks, number, id) = (rank.n_ranks(), i32::try_from(rank.rank())?, id(rank)?);
    let id = nccl::sys::ncclUniqueId { internal: *id.internal() };
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` is writable, and all ranks pass the same id and their own number.
    unsafe { nccl::result::comm_init_rank(&raw mut raw, i32::try_from(n_ranks)?, id, number) }
        .map_err(of_nccl("ncclCommInitRank"))?;
    // SAFETY: it is of the same NCCL, on this rank's GPU, nothing else uses it, and it is destroyed
    // below, after the adopted one.
    let comm = unsafe { rank.communicator_from_raw(raw.cast()) }?;
    comm.all_reduce(slice, slice, ReduceOp::Sum, stream)?;
    require(&memory.stream().clone_dtoh(&**memory)?, n_ranks.pow(3))?;
    drop(comm);
    // SAFETY: its operations are complete, and nothing uses it any more.
    unsafe { nccl::result::comm_destroy(raw) }.map_err(of_nccl("ncclCommDestroy"))?;
    Ok(())
}

/// Returns a unique id of rank 0's for a communicator of all ranks.
fn id(rank: &Rank) -> Result<nccl::Id> {
    let own = if rank.is_root() {
        nccl::Id::new().map_err(of_nccl("ncclGetUniqueId"))?.internal().to_vec()
    } else {
        Vec::new()
    };
    let all = rank.broadcast(0, &own)?;
    Ok(nccl::Id::uninit(all.as_slice().try_into().context("rank 0's unique id")?))
}

/// Names the function of NCCL that returned the error.
fn of_nccl(function: &'static str) -> impl Fn(NcclError) -> anyhow::Error {
    move |error| anyhow!("{function}: {error:?}")
}

fn require(sums: &[f32], expected: usize) -> Result<()> {
    let wrong = sums.iter().filter(|&&sum| sum != expected as f32).count();
    ensure!(wrong == 0, "{wrong} of {} elements are not {expected}", sums.len());
    Ok(())
}
