//! All GPUs of one process, driven by one thread: collectives on lists of buffers, one per GPU.

use super::{Communicator, Library, ReduceOp, group};
use crate::device::{Buffer, Context, DeviceSlice, Stream, gpus_of};
use crate::error::{Error, Result};

/// The communicators of several GPUs, each with a stream.
///
/// The operations take one buffer per GPU, in rank order, and are enqueued in one group;
/// [`synchronize`](Self::synchronize) waits for all of them.
///
/// ```no_run
/// # use devcomm_host::{Library, MultiGpu, ReduceOp, Result};
/// # fn main() -> Result<()> {
/// let gpus = MultiGpu::all(&Library::open(None)?)?;
/// let buffers = gpus.communicators().iter().map(|comm| comm.mem_alloc::<f32>(1024));
/// let buffers = buffers.collect::<Result<Vec<_>>>()?;
/// gpus.all_reduce(&buffers, &buffers, ReduceOp::Sum)?; // in place
/// gpus.synchronize()
/// # }
/// ```
#[derive(Debug)]
pub struct MultiGpu {
    communicators: Vec<Communicator>,
    streams: Vec<Stream>,
}

impl MultiGpu {
    /// Returns the GPUs with these ordinals on the library's machine, rank `i` on the `i`th.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Communicator::init_all`];
    /// [`DriverError::NoDriver`](crate::DriverError::NoDriver),
    /// [`DriverError::NoGpu`](crate::DriverError::NoGpu),
    /// [`DriverError::TooFewGpus`](crate::DriverError::TooFewGpus).
    pub fn new(library: &Library, devices: &[usize]) -> Result<Self> {
        let machine = library.nccl().machine();
        let contexts = devices.iter().map(|&device| Context::on(machine, device));
        let contexts = contexts.collect::<Result<Vec<_>>>()?;
        let streams = contexts.iter().map(Context::stream).collect::<Result<_>>()?;
        Ok(Self { communicators: Communicator::init_all(library, &contexts)?, streams })
    }

    /// Returns all visible GPUs.
    ///
    /// # Errors
    ///
    /// The errors are those of [`new`](Self::new).
    pub fn all(library: &Library) -> Result<Self> {
        Self::new(library, &(0..gpus_of(library.nccl().machine())?).collect::<Vec<_>>())
    }

    /// Returns the communicators, in rank order.
    #[must_use]
    pub fn communicators(&self) -> &[Communicator] {
        &self.communicators
    }

    /// Returns the streams, in rank order.
    #[must_use]
    pub fn streams(&self) -> &[Stream] {
        &self.streams
    }

    /// Sets the streams for later operations, one per GPU.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] unless there is one stream per GPU, of that GPU's context.
    pub fn set_streams(&mut self, streams: Vec<Stream>) -> Result<()> {
        self.require_per_gpu("streams", streams.len())?;
        for (communicator, stream) in self.communicators.iter().zip(&streams) {
            communicator.require_own(stream.context(), "a stream")?;
        }
        self.streams = streams;
        Ok(())
    }

    /// Puts into every `recv` the reduction of all `send`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] unless there is one buffer per GPU; the errors of
    /// [`Communicator::all_reduce`].
    pub fn all_reduce<S, R>(&self, send: &[S], recv: &[R], op: ReduceOp) -> Result<()>
    where
        S: Buffer,
        R: Buffer<Element = S::Element>,
    {
        self.each(&[send.len(), recv.len()], |rank, comm, stream| {
            comm.all_reduce(&send[rank], &recv[rank], op, stream)
        })
    }

    /// Puts into `recv`, on the GPU of rank `root`, the reduction of all `send`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`all_reduce`](Self::all_reduce).
    pub fn reduce<S, R>(&self, send: &[S], recv: &R, op: ReduceOp, root: usize) -> Result<()>
    where
        S: Buffer,
        R: Buffer<Element = S::Element>,
    {
        self.each(&[send.len()], |rank, comm, stream| {
            comm.reduce(&send[rank], at_root(rank, root, recv), op, root, stream)
        })
    }

    /// Copies the buffer of rank `root` to those of all other ranks.
    ///
    /// # Errors
    ///
    /// The errors are those of [`all_reduce`](Self::all_reduce).
    pub fn broadcast<B: Buffer>(&self, buffers: &[B], root: usize) -> Result<()> {
        self.each(&[buffers.len()], |rank, comm, stream| {
            comm.broadcast(at_root(rank, root, &buffers[rank]), &buffers[rank], root, stream)
        })
    }

    /// Puts into every `recv` all `send`, in rank order.
    ///
    /// # Errors
    ///
    /// The errors are those of [`all_reduce`](Self::all_reduce).
    pub fn all_gather<S, R>(&self, send: &[S], recv: &[R]) -> Result<()>
    where
        S: Buffer,
        R: Buffer<Element = S::Element>,
    {
        self.each(&[send.len(), recv.len()], |rank, comm, stream| {
            comm.all_gather(&send[rank], &recv[rank], stream)
        })
    }

    /// Puts into every `recv` its rank's chunk of the reduction of all `send`.
    ///
    /// # Errors
    ///
    /// The errors are those of [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter<S, R>(&self, send: &[S], recv: &[R], op: ReduceOp) -> Result<()>
    where
        S: Buffer,
        R: Buffer<Element = S::Element>,
    {
        self.each(&[send.len(), recv.len()], |rank, comm, stream| {
            comm.reduce_scatter(&send[rank], &recv[rank], op, stream)
        })
    }

    /// Runs `f` for every GPU, in one group: for operations without a method here.
    ///
    /// # Errors
    ///
    /// Those of `f` and of the group.
    pub fn for_each(&self, f: impl Fn(usize, &Communicator, &Stream) -> Result<()>) -> Result<()> {
        self.each(&[], f)
    }

    /// Waits for the streams of all GPUs.
    ///
    /// # Errors
    ///
    /// The errors are those of [`Stream::synchronize`].
    pub fn synchronize(&self) -> Result<()> {
        self.streams.iter().try_for_each(Stream::synchronize)
    }

    /// Runs `f` for every GPU, in one group; fails unless each of the `lists` of buffers, of which
    /// these are the lengths, has one per GPU.
    fn each(
        &self,
        lists: &[usize],
        f: impl Fn(usize, &Communicator, &Stream) -> Result<()>,
    ) -> Result<()> {
        lists.iter().try_for_each(|&len| self.require_per_gpu("buffers", len))?;
        let gpus = self.communicators.iter().zip(&self.streams).enumerate();
        group(|_| {
            let mut gpus = gpus;
            gpus.try_for_each(|(rank, (comm, stream))| f(rank, comm, stream))
        })
    }

    fn require_per_gpu(&self, what: &str, len: usize) -> Result<()> {
        let n = self.communicators.len();
        if len == n { Ok(()) } else { Err(Error::invalid(format!("{len} {what} for {n} GPUs"))) }
    }
}

fn at_root<B: Buffer>(rank: usize, root: usize, buffer: &B) -> Option<DeviceSlice<B::Element>> {
    (rank == root).then(|| buffer.device_slice())
}
