//! Tests of every kind of memory argument: buffers, windows, slices, typed and untyped addresses;
//! and of memory lifetime, events and groups.

use devcomm::{
    Buffer, CollectiveConfig, DeviceSlice, Dynamic, Error, F8E4M3, F8E5M2, Rank, ReduceOp, Stream,
    group, simulate,
};

use devcomm_testing::machines::on_gpus;
use devcomm_testing::works::require_works;

const COUNT: usize = 1000;

/// Runs one all-reduce (sum) and waits for it.
fn reduces<S, R>(rank: &Rank, stream: &Stream, send: &S, recv: &R) -> Result<(), Error>
where
    S: Buffer,
    R: Buffer<Element = S::Element>,
{
    rank.communicator()?.all_reduce(send, recv, ReduceOp::Sum, stream)?;
    stream.synchronize()
}

#[test]
fn every_form_of_memory() {
    on_gpus("every_form_of_memory", 2, |rank| {
        let (comm, stream, context) = (rank.communicator()?, rank.stream()?, rank.context());
        let (send, recv) = (comm.mem_alloc::<f32>(COUNT)?, comm.mem_alloc::<f32>(COUNT)?);
        let (send_window, recv_window) = (comm.window::<f32>(COUNT)?, comm.window::<f32>(COUNT)?);
        send.copy_from_host(&[1.0; COUNT])?;
        send_window.copy_from_host(&[1.0; COUNT])?;
        let raw = |address, len| {
            // SAFETY: one of the four above has the memory, and outlives the last synchronize.
            unsafe { DeviceSlice::<f32>::from_raw_parts(context, address, len) }
        };
        let (raw_send, raw_recv) =
            (raw(send.device_address(), COUNT), raw(recv_window.device_address(), COUNT));

        let require_twos = |slice: &DeviceSlice<f32>| {
            let mut got = vec![0.0; slice.len()];
            slice.copy_to_host(&mut got)?;
            assert!(got.iter().all(|&x| x == 2.0), "{slice:?}");
            slice.fill_bytes(0xff)
        };
        reduces(rank, &stream, &send, &recv)?;
        require_twos(&recv.device_slice())?;
        reduces(rank, &stream, &send_window, &recv_window)?;
        require_twos(&recv_window.device_slice())?;
        reduces(rank, &stream, &send, &recv_window)?;
        require_twos(&recv_window.device_slice())?;
        reduces(rank, &stream, &raw_send, &raw_recv)?;
        require_twos(&raw_recv)?;
        reduces(rank, &stream, &send, &raw_recv)?;
        require_twos(&raw_recv)?;
        let dynamic =
            |slice: &DeviceSlice<f32>| -> DeviceSlice<Dynamic> { slice.clone().into_dynamic() };
        reduces(rank, &stream, &dynamic(&raw_send), &dynamic(&recv.device_slice()))?;
        require_twos(&recv.device_slice())?;

        // Only the slice is reduced; the end of `..=` is included.
        recv.copy_from_host(&[7.0; COUNT])?;
        reduces(rank, &stream, &send.slice(10..20)?, &recv.slice(100..=109)?)?;
        let mut got = vec![0.0; COUNT];
        recv.copy_to_host(&mut got)?;
        let expected = |i| if (100..110).contains(&i) { 2.0 } else { 7.0 };
        assert!(got.iter().enumerate().all(|(i, &x)| x == expected(i)));
        // Empty slices are allowed.
        reduces(rank, &stream, &send.slice(5..5)?, &recv.slice(..0)?)
    });
}

/// All-reduces of `F8E4M3` and `F8E5M2`; the values are exact in both types.
#[test]
fn floats_of_8_bits_by_their_types() {
    on_gpus("floats_of_8_bits_by_their_types", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let value = |rank: usize, i: usize| ((rank + i) % 5) as f32 - 2.0;
        macro_rules! sums {
            ($float:ty) => {
                let memory = comm.mem_alloc::<$float>(COUNT)?;
                let own = (0..COUNT).map(|i| <$float>::from_f32(value(rank.rank(), i)));
                memory.copy_from_host(&own.collect::<Vec<_>>())?;
                reduces(rank, &stream, &memory, &memory)?;
                let mut got = vec![<$float>::from_bits(0xff); COUNT];
                memory.copy_to_host(&mut got)?;
                for (i, x) in got.iter().enumerate() {
                    assert_eq!(x.to_f32(), value(0, i) + value(1, i), "element {i}");
                }
            };
        }
        sums!(F8E4M3);
        sums!(F8E5M2);
        Ok(())
    });
}

/// A second stream can start as soon as a collective's kernel has launched; here that stream waits
/// only for the event.
#[test]
fn a_collective_records_an_event_when_it_was_launched() {
    on_gpus("a_collective_records_an_event_when_it_was_launched", 2, |rank| {
        let (comm, stream, side) = (rank.communicator()?, rank.stream()?, rank.stream()?);
        let memory = comm.mem_alloc::<f32>(COUNT)?;
        let config = CollectiveConfig::new();
        let timed = comm.configured_recording(&config, &rank.context().event()?);
        assert!(matches!(timed, Err(Error::InvalidInput { .. })), "{timed:?}");
        let event = rank.context().event_without_timing()?;
        let configured = comm.configured_recording(&config, &event)?;
        configured.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
        side.wait_event(&event)?;
        side.synchronize()?;
        assert!(event.is_reached()?);
        stream.synchronize()?;
        require_works(comm, &stream)
    });
}

/// An operation's memory stays allocated until the stream has run it.
#[test]
fn memory_may_be_dropped_while_it_is_used() {
    on_gpus("memory_may_be_dropped_while_it_is_used", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let recv = comm.mem_alloc::<u32>(1 << 20)?;
        {
            let send = comm.mem_alloc::<u32>(1 << 20)?;
            send.fill_bytes(1)?;
            for _ in 0..20 {
                comm.all_reduce(&send, &recv, ReduceOp::Sum, &stream)?;
            }
        }
        stream.synchronize()?;
        let mut got = vec![0; 1 << 20];
        recv.copy_to_host(&mut got)?;
        assert!(got.iter().all(|&x| x == 0x0202_0202));
        Ok(())
    });
}

#[test]
fn a_failed_group_does_nothing_and_an_inner_one_takes_only_its_own_along() {
    let name = "a_failed_group_does_nothing_and_an_inner_one_takes_only_its_own_along";
    on_gpus(name, 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (a, b) = (comm.mem_alloc::<u8>(COUNT)?, comm.mem_alloc::<u8>(COUNT)?);
        let c = comm.mem_alloc::<u8>(COUNT)?;
        a.fill_bytes(1)?;
        let peer = 1 - rank.rank();
        let refused = group(|open| {
            comm.send(&a, peer, &stream)?;
            comm.recv(&b, peer, &stream)?;
            assert_eq!(open.len(), 2);
            comm.send(&a, 2, &stream)
        });
        assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");
        group(|_| {
            comm.send(&a, peer, &stream)?;
            let inner = group(|_| {
                comm.recv(&b, peer, &stream)?;
                Err::<(), _>(Error::InvalidInput { what: "changed its mind".to_owned() })
            });
            assert!(inner.is_err());
            group(|_| comm.recv(&c, peer, &stream))
        })?;
        stream.synchronize()?;
        let mut bytes = vec![0; COUNT];
        b.copy_to_host(&mut bytes)?;
        assert!(bytes.iter().all(|&x| x == 0));
        c.copy_to_host(&mut bytes)?;
        assert!(bytes.iter().all(|&x| x == 1));
        require_works(comm, &stream)
    });
}

#[test]
fn a_simulated_group_runs_nothing() {
    on_gpus("a_simulated_group_runs_nothing", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (send, recv) = (comm.mem_alloc::<u8>(1 << 20)?, comm.mem_alloc::<u8>(1 << 20)?);
        send.fill_bytes(1)?;
        require_works(comm, &stream)?;
        simulate(|_| comm.all_reduce(&send, &recv, ReduceOp::Sum, &stream))?;
        stream.synchronize()?;
        let mut got = vec![1; 1 << 20];
        recv.copy_to_host(&mut got)?;
        assert!(got.iter().all(|&x| x == 0));
        require_works(comm, &stream)
    });
}
