//! Tests of stream-ordered copies and fills.

use devcomm::{Buffer, Element, Error, Rank, ReduceOp, StateError, Stream};
use devcomm_testing::machines::on_gpus;
use devcomm_testing::works::require_works;
use half::bf16;

const COUNT: usize = 1000;

/// Returns the elements of memory, copied in stream order.
fn contents<T: Element + Default>(
    stream: &Stream,
    memory: &impl Buffer<Element = T>,
) -> Result<Vec<T>, Error> {
    let mut data = vec![T::default(); memory.device_slice().len()];
    stream.copy_to_host(memory, &mut data)?;
    Ok(data)
}

/// Checks copies, fills and all-reduces that nothing but the stream orders.
fn follow_the_stream(rank: &Rank, stream: &Stream) -> Result<(), Error> {
    let comm = rank.communicator()?;
    let (memory, sum) = (comm.window::<f32>(COUNT)?, comm.mem_alloc::<f32>(COUNT)?);
    for round in 0..20 {
        let value = round as f32;
        if round % 2 == 0 {
            stream.fill(&memory, value)?;
        } else {
            stream.copy_to_device(&[value; COUNT], &memory)?;
        }
        comm.all_reduce(&memory, &memory, ReduceOp::Sum, stream)?;
        stream.copy(&memory, &sum)?;
        stream.fill(&memory.slice(1..)?, -1.0)?;
        let total = value * rank.n_ranks() as f32;
        assert_eq!(contents(stream, &sum)?, [total; COUNT]);
        let filled = contents(stream, &memory)?;
        assert_eq!(filled[0], total);
        assert!(filled[1..].iter().all(|&x| x == -1.0));
    }
    Ok(())
}

#[test]
fn copies_and_fills_come_in_the_order_of_their_stream() {
    on_gpus("copies_and_fills_come_in_the_order_of_their_stream", 2, |rank| {
        follow_the_stream(rank, &rank.stream()?)
    });
}

#[test]
fn the_default_stream_does_what_streams_do() {
    on_gpus("the_default_stream_does_what_streams_do", 2, |rank| {
        follow_the_stream(rank, &rank.default_stream())?;
        // Another handle of the default stream works too.
        require_works(rank.communicator()?, &rank.default_stream())
    });
}

fn fills<T: Element + Default + PartialEq + std::fmt::Debug>(
    rank: &Rank,
    value: T,
) -> Result<(), Error> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let memory = comm.mem_alloc::<T>(COUNT)?;
    stream.fill(&memory.slice(3..COUNT - 2)?, value)?;
    let got = contents(&stream, &memory)?;
    let (before, filled, after) = (&got[..3], &got[3..COUNT - 2], &got[COUNT - 2..]);
    assert!(filled.iter().all(|&x| x == value), "{value:?} is not in {filled:?}");
    assert!(before.iter().chain(after).all(|&x| x == T::default()), "{value:?} is in {got:?}");
    Ok(())
}

#[test]
fn a_fill_sets_elements_of_every_size_and_nothing_else() {
    on_gpus("a_fill_sets_elements_of_every_size_and_nothing_else", 1, |rank| {
        fills(rank, -5_i8)?;
        fills(rank, bf16::from_f32(1.5))?;
        fills(rank, 0x0123_4567_u32)?;
        fills(rank, -0.1_f32)?;
        fills(rank, 0x0123_4567_89ab_cdef_u64)?;
        fills(rank, -0.1_f64)
    });
}

#[test]
fn a_graph_has_copies_and_fills_and_keeps_their_memory() {
    on_gpus("a_graph_has_copies_and_fills_and_keeps_their_memory", 1, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let (from, to) = (comm.mem_alloc::<f64>(COUNT)?, comm.mem_alloc::<f64>(COUNT)?);
        stream.copy_to_device(&[1.5; COUNT], &from)?;
        let graph = stream.capture(|| {
            let host = stream.copy_to_device(&[0.0; COUNT], &from);
            assert!(matches!(host, Err(Error::State(StateError::Capturing { .. }))), "{host:?}");
            stream.copy(&from, &to)?;
            stream.fill(&from, 2.5)
        })?;
        drop(from);
        // Freed memory would be reused by this allocation.
        comm.mem_alloc::<f64>(COUNT)?.fill_bytes(0xee)?;
        for expected in [1.5, 2.5] {
            graph.launch(&stream)?;
            assert_eq!(contents(&stream, &to)?, [expected; COUNT]);
        }
        Ok(())
    });
}

#[test]
fn memory_of_one_gpu_needs_no_communicator() {
    on_gpus("memory_of_one_gpu_needs_no_communicator", 1, |rank| {
        /// More than a driver sets aside.
        const LARGE: usize = 1 << 26;
        let (stream, context) = (rank.stream()?, rank.context());
        let (from, to) = (context.alloc::<f32>(COUNT)?, context.alloc::<f32>(COUNT)?);
        assert_eq!((from.len(), contents(&stream, &from)?), (COUNT, vec![0.0; COUNT]));
        let same = from.clone();
        stream.fill(&from, 1.5)?;
        drop(from);
        stream.copy(&same, &to)?;
        assert_eq!(contents(&stream, &to)?, [1.5; COUNT]);
        let empty = context.alloc::<f32>(0).unwrap_err().to_string();
        assert!(empty.contains("0 elements"), "{empty}");
        let mut refused = None;
        stream.capture(|| {
            refused = context.alloc::<f32>(COUNT).err();
            stream.copy(&same, &to)
        })?;
        assert!(matches!(refused, Some(Error::State(StateError::Capturing { .. }))), "{refused:?}");
        // Memory that is dropped is free again.
        let (free, _) = context.memory_info()?;
        drop(context.alloc::<u8>(LARGE)?);
        assert!(context.memory_info()?.0 + LARGE / 2 > free);
        Ok(())
    });
}

/// Overlaps rounds: while the stream works on one, the host prepares the next.
#[test]
fn pinned_memory_is_copied_while_the_host_goes_on() {
    on_gpus("pinned_memory_is_copied_while_the_host_goes_on", 2, |rank| {
        let (comm, stream, context) = (rank.communicator()?, rank.stream()?, rank.context());
        let memory = comm.mem_alloc::<u64>(COUNT)?;
        let mut input = [context.pinned(COUNT)?, context.pinned(COUNT)?];
        let mut sums = [context.pinned(COUNT)?, context.pinned(COUNT)?];
        for round in 0..20_usize {
            let [send, recv] = [&mut input[round % 2], &mut sums[round % 2]];
            if let Some(before) = round.checked_sub(2) {
                let sum = (before * rank.n_ranks()) as u64;
                assert!(recv.as_slice()?.iter().all(|&x| x == sum), "round {before}");
            }
            send.as_mut_slice()?.fill(round as u64);
            stream.copy_to_device_async(send, &memory)?;
            comm.all_reduce(&memory, &memory, ReduceOp::Sum, &stream)?;
            stream.copy_to_host_async(&memory, recv)?;
        }
        stream.synchronize()
    });
}
