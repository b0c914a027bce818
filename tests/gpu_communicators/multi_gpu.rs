//! Tests of `MultiGpu`: one thread uses several GPUs.

use devcomm::{
    Buffer, DeviceSlice, Error, MultiGpu, ReduceOp, Result, Signal, SymmetricBuffer,
    WaitSignalDesc, WindowFlags, group,
};

use devcomm_testing::machines::Gpus;

const COUNT: usize = 1000;

fn on_one_thread(name: &str, n: usize, body: impl FnOnce(&MultiGpu) -> Result<()>) {
    Gpus::new(n).with_threads(name, |world| {
        let gpus = (0..n).collect::<Vec<_>>();
        let result = MultiGpu::new(world.library(), &gpus).and_then(|gpus| {
            body(&gpus)?;
            gpus.synchronize()
        });
        if let Err(error) = result {
            panic!("{error}");
        }
    });
}

/// Returns one buffer per GPU, whose element `i` is `element(rank, i)`.
fn buffers(
    gpus: &MultiGpu,
    len: usize,
    element: impl Fn(usize, usize) -> u32,
) -> Result<Vec<SymmetricBuffer<u32>>> {
    let make = |(rank, comm): (usize, &devcomm::Communicator)| {
        let buffer = comm.mem_alloc(len)?;
        buffer.copy_from_host(&(0..len).map(|i| element(rank, i)).collect::<Vec<u32>>())?;
        Ok(buffer)
    };
    gpus.communicators().iter().enumerate().map(make).collect()
}

fn require(memory: &DeviceSlice<u32>, right: impl Fn(usize) -> u32, what: &str) -> Result<()> {
    let mut got = vec![0; memory.len()];
    memory.copy_to_host(&mut got)?;
    let wrong = got.iter().enumerate().find(|&(i, &x)| x != right(i));
    assert!(wrong.is_none(), "{what}: {wrong:?}");
    Ok(())
}

/// Returns the element `i` of rank `rank`.
fn value(rank: usize, i: usize) -> u32 {
    (rank * 10_000 + i) as u32
}

fn every_operation(gpus: &MultiGpu) -> Result<()> {
    let n = gpus.communicators().len();
    let sum = |i: usize| (0..n).map(|rank| value(rank, i)).sum::<u32>();
    let send = buffers(gpus, COUNT, value)?;
    let recv = buffers(gpus, COUNT, |_, _| 0)?;
    gpus.all_reduce(&send, &recv, ReduceOp::Sum)?;
    gpus.synchronize()?;
    recv.iter().try_for_each(|recv| require(&recv.device_slice(), sum, "all_reduce"))?;

    let root = n - 1;
    gpus.reduce(&send, &recv[root], ReduceOp::Max, root)?;
    gpus.synchronize()?;
    require(&recv[root].device_slice(), |i| value(n - 1, i), "reduce")?;

    let copies = buffers(gpus, COUNT, value)?;
    gpus.broadcast(&copies, root)?;
    gpus.synchronize()?;
    for copy in &copies {
        require(&copy.device_slice(), |i| value(root, i), "broadcast")?;
    }

    let all = buffers(gpus, n * COUNT, |_, _| 0)?;
    gpus.all_gather(&send, &all)?;
    gpus.synchronize()?;
    for all in &all {
        require(&all.device_slice(), |i| value(i / COUNT, i % COUNT), "all_gather")?;
    }

    let (parts, wholes) = (buffers(gpus, COUNT, |_, _| 0)?, buffers(gpus, n * COUNT, value)?);
    gpus.reduce_scatter(&wholes, &parts, ReduceOp::Sum)?;
    gpus.synchronize()?;
    for (rank, part) in parts.iter().enumerate() {
        require(&part.device_slice(), |i| sum(rank * COUNT + i), "reduce_scatter")?;
    }

    gpus.for_each(|rank, comm, stream| {
        comm.send(&send[rank], (rank + 1) % n, stream)?;
        comm.recv(&recv[rank], (rank + n - 1) % n, stream)
    })?;
    gpus.synchronize()?;
    for (rank, recv) in recv.iter().enumerate() {
        require(&recv.device_slice(), |i| value((rank + n - 1) % n, i), "send and recv")?;
    }

    let refused = gpus.all_reduce(&send[1..], &recv, ReduceOp::Sum);
    assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");
    Ok(())
}

#[test]
fn every_operation_of_two_gpus_on_one_thread() {
    on_one_thread("every_operation_of_two_gpus_on_one_thread", 2, every_operation);
}

#[test]
fn every_operation_of_four_gpus_on_one_thread() {
    on_one_thread("every_operation_of_four_gpus_on_one_thread", 4, every_operation);
}

/// Registers windows of all communicators in one group, and runs collectives on them.
#[test]
fn windows_of_several_communicators_in_one_group() {
    on_one_thread("windows_of_several_communicators_in_one_group", 2, |gpus| {
        let (send, recv) = (buffers(gpus, COUNT, value)?, buffers(gpus, COUNT, |_, _| 0)?);
        let register = |memory: &[SymmetricBuffer<u32>]| {
            let pairs = gpus.communicators().iter().zip(memory);
            pairs
                .map(|(comm, memory)| comm.register_window(memory, WindowFlags::COLL_SYMMETRIC))
                .collect::<Result<Vec<_>>>()
        };
        let (send, recv) = group(|_| Ok::<_, Error>((register(&send)?, register(&recv)?)))?;
        assert!(send.iter().chain(&recv).all(devcomm::Window::is_valid));
        gpus.all_reduce(&send, &recv, ReduceOp::Sum)?;
        gpus.synchronize()?;
        for recv in &recv {
            require(&recv.device_slice(), |i| value(0, i) + value(1, i), "all_reduce")?;
        }
        // Without a World, the length of a peer's window is not known.
        assert_eq!(recv[0].len_of(1), None);
        gpus.for_each(|rank, comm, stream| {
            let to = Signal::to(1 - rank);
            let refused = comm.put_signal(&send[rank], &recv[rank], 0, to, stream);
            let Err(Error::InvalidInput { what }) = refused else { panic!("{refused:?}") };
            assert!(what.contains("put_signal_unchecked"), "{what}");
            // SAFETY: all windows have the same length.
            unsafe { comm.put_signal_unchecked(&send[rank], &recv[rank], 0, to, stream) }?;
            comm.wait_signal(&[WaitSignalDesc::from(1 - rank)], stream)
        })?;
        gpus.synchronize()?;
        for (rank, recv) in recv.iter().enumerate() {
            require(&recv.device_slice(), |i| value(1 - rank, i), "put_signal_unchecked")?;
        }
        Ok(())
    });
}

#[test]
fn other_streams_may_be_used() {
    Gpus::new(2).with_threads("other_streams_may_be_used", |world| {
        let result = MultiGpu::new(world.library(), &[0, 1]).and_then(|mut gpus| {
            let contexts = gpus.communicators().iter().map(|comm| comm.context().clone());
            let streams = contexts.map(|context| context.stream()).collect::<Result<Vec<_>>>()?;
            let swapped = vec![streams[1].clone(), streams[0].clone()];
            assert!(matches!(gpus.set_streams(swapped), Err(Error::InvalidInput { .. })));
            assert!(gpus.set_streams(vec![streams[0].clone()]).is_err());
            let handles: Vec<_> = streams.iter().map(devcomm::Stream::as_raw).collect();
            gpus.set_streams(streams)?;
            assert!(gpus.streams().iter().map(devcomm::Stream::as_raw).eq(handles));
            every_operation(&gpus)
        });
        if let Err(error) = result {
            panic!("{error}");
        }
    });
}
