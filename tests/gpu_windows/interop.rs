//! Tests with memory and streams of other libraries: cudarc's types, and raw stream handles.

use std::sync::Arc;

use devcomm::cudarc::driver::CudaContext;
use devcomm::{Buffer, DeviceSlice, Error, ReduceOp, Stream, visible_gpus};

use devcomm_testing::machines::{Gpus, on_gpus};
use devcomm_testing::works::{require_kernels_work, require_works};

const COUNT: usize = 1000;

#[test]
fn cudarcs_memory_on_cudarcs_stream() {
    let gpus = Gpus::new(2).only_real("CUDA driver that cudarc loads");
    gpus.run("cudarcs_memory_on_cudarcs_stream", |rank| {
        let comm = rank.communicator()?;
        let cuda = CudaContext::new(rank.device()).unwrap();
        let theirs = cuda.new_stream().unwrap();
        let stream = Stream::from_cudarc(rank.context(), &theirs)?;
        assert_eq!(stream.as_raw(), theirs.cu_stream().cast());
        require_works(comm, &stream)?;
        require_kernels_work(rank, comm, &stream)?;

        let memory = Arc::new(theirs.clone_htod(&[rank.rank() as f32 + 1.0; COUNT]).unwrap());
        let slice = DeviceSlice::from_cudarc(rank.context(), &memory)?;
        assert_eq!(slice.len(), COUNT);
        comm.all_reduce(&slice, &slice, ReduceOp::Sum, &stream)?;
        // This copy follows the all-reduce in the same stream.
        let sums = theirs.clone_dtoh(&*memory).unwrap();
        assert!(sums.iter().all(|&x| x == 3.0));

        let other = CudaContext::new((rank.device() + 1) % visible_gpus()?).unwrap();
        let elsewhere = Stream::from_cudarc(rank.context(), &other.new_stream().unwrap());
        assert!(matches!(elsewhere, Err(Error::InvalidInput { .. })), "{elsewhere:?}");
        let memory_elsewhere = Arc::new(other.default_stream().alloc_zeros::<f32>(1).unwrap());
        let elsewhere = DeviceSlice::from_cudarc(rank.context(), &memory_elsewhere);
        assert!(matches!(elsewhere, Err(Error::InvalidInput { .. })), "{elsewhere:?}");
        // cudarc has made the other GPU's context current on this thread.
        require_works(comm, &stream)?;

        // The slice, and an operation on a part of it, keep cudarc's memory.
        let weak = Arc::downgrade(&memory);
        drop(memory);
        let part = slice.slice(..10)?;
        drop(slice);
        assert!(weak.upgrade().is_some());
        comm.all_reduce(&part, &part, ReduceOp::Sum, &stream)?;
        drop(part);
        assert!(weak.upgrade().is_none());

        // devcomm's `Stream` keeps cudarc's stream alive.
        let handle = theirs.cu_stream();
        drop(theirs);
        assert_eq!(stream.as_raw(), handle.cast());
        require_works(comm, &stream)
    });
}

#[test]
fn another_librarys_stream_by_its_handle() {
    on_gpus("another_librarys_stream_by_its_handle", 2, |rank| {
        let (comm, owner) = (rank.communicator()?, rank.stream()?);
        // SAFETY: `owner` is a stream of this context, and outlives `borrowed`.
        let borrowed = unsafe { Stream::from_raw(rank.context(), owner.as_raw()) };
        require_works(comm, &borrowed)?;
        require_kernels_work(rank, comm, &borrowed)?;
        drop(borrowed);
        // The stream was not destroyed.
        require_works(comm, &owner)?;

        // These are NULL and CU_STREAM_LEGACY.
        for raw in [0, 1].map(std::ptr::without_provenance_mut) {
            // SAFETY: the default stream always exists.
            let default = unsafe { Stream::from_raw(rank.context(), raw) };
            require_works(comm, &default)?;
            require_kernels_work(rank, comm, &default)?;
        }
        Ok(())
    });
}
