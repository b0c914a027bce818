//! Tests of `devcomm::Collectives`.

use devcomm::{Algorithm, Buffer, Collectives, DataType, Element, Rank, ReduceOp, Result};
use devcomm_testing::machines::on_gpus;
use half::{bf16, f16};

/// Numbers whose sums over 8 ranks are exact in every type.
trait Number: Element {
    fn of(value: i32) -> Self;
    fn value(self) -> f32;
}

macro_rules! numbers {
    ($($type:ident $to:path, $from:path;)*) => { $(
        impl Number for $type {
            fn of(value: i32) -> Self {
                $from(value as f32)
            }

            fn value(self) -> f32 {
                $to(self)
            }
        }
    )* };
}

numbers! {
    f32 std::convert::identity, std::convert::identity;
    f16 f16::to_f32, f16::from_f32;
    bf16 bf16::to_f32, bf16::from_f32;
}

/// What rank `rank` sends in a launch.
fn sent(rank: usize, launch: usize, i: usize) -> i32 {
    ((rank * 5 + launch * 3 + i) % 17) as i32 - 8
}

/// All-reduces of changing lengths, one after the other without a wait, in and out of place.
fn all_reduces<T: Number>(rank: &Rank, op: ReduceOp, counts: &[usize]) -> Result<()> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let collectives = Collectives::new(comm)?;
    let mut launched = Vec::new();
    for (launch, &count) in counts.iter().enumerate() {
        let algorithm = collectives.all_reduce_algorithm(T::DATA_TYPE, count, op);
        assert_eq!(algorithm, Algorithm::Lamport, "{count}");
        let elements: Vec<T> = (0..count).map(|i| T::of(sent(rank.rank(), launch, i))).collect();
        let skip = launch % 2;
        let send = comm.mem_alloc::<T>(skip + count)?.slice(skip..)?;
        send.copy_from_host(&elements)?;
        // Every third is in place; the others have one element more, which stays as it is.
        let recv = match launch % 3 {
            0 => None,
            _ => Some(comm.mem_alloc::<T>(count + 1)?),
        };
        if let Some(recv) = &recv {
            recv.fill_bytes(0xff)?;
        }
        launched.push((count, send, recv));
    }
    for (count, send, recv) in &launched {
        match recv {
            Some(recv) => collectives.all_reduce(send, &recv.slice(..*count)?, op, &stream)?,
            None => collectives.all_reduce(send, send, op, &stream)?,
        }
    }
    stream.synchronize()?;
    for (launch, (count, send, recv)) in launched.iter().enumerate() {
        let result = recv.as_ref().map_or_else(|| send.clone(), Buffer::device_slice);
        let mut got = vec![T::of(0); result.len()];
        result.copy_to_host(&mut got)?;
        for (i, got) in got.iter().enumerate().take(*count) {
            let all = (0..rank.n_ranks()).map(|rank| sent(rank, launch, i));
            let want = match op {
                ReduceOp::Max => all.max().unwrap_or(0) as f32,
                ReduceOp::Min => all.min().unwrap_or(0) as f32,
                ReduceOp::Avg => T::of(0).value() + all.sum::<i32>() as f32 / rank.n_ranks() as f32,
                _ => all.sum::<i32>() as f32,
            };
            assert_eq!(got.value(), want, "{op:?} {launch}: element {i} of {count}");
        }
        assert!(recv.is_none() || got[*count].value().is_nan(), "{launch}: wrote behind the end");
    }
    Ok(())
}

/// Lengths around vectors, blocks and the lengths of the launches before.
fn counts(rank: &Rank) -> Vec<usize> {
    match rank.is_simulated() {
        true => vec![1, 100, 7, 8, 300, 1, 1, 1025, 3, 64],
        false => vec![1, 100, 7, 1 << 18, 300, 1, 1, 100_003, 3, 8192, 1 << 18, 64, 5, 4096],
    }
}

#[test]
fn short_all_reduces_follow_each_other() {
    for ranks in [2, 4] {
        on_gpus("short_all_reduces_follow_each_other", ranks, |rank| {
            let counts = counts(rank);
            all_reduces::<f32>(rank, ReduceOp::Sum, &counts)?;
            all_reduces::<bf16>(rank, ReduceOp::Max, &counts)?;
            all_reduces::<f16>(rank, ReduceOp::Min, &counts[..4])?;
            all_reduces::<bf16>(rank, ReduceOp::Avg, &counts[..4])
        });
    }
}

#[test]
fn zeros_of_either_sign_arrive() {
    on_gpus("zeros_of_either_sign_arrive", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = Collectives::new(comm)?;
        let data = comm.mem_alloc::<f32>(8)?;
        data.copy_from_host(&[-0.0, 0.0, -0.0, 1.0, -0.0, -0.0, -0.0, -0.0])?;
        collectives.all_reduce(&data, &data, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        let mut got = [f32::NAN; 8];
        data.copy_to_host(&mut got)?;
        assert_eq!(got, [0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]);
        Ok(())
    });
}

#[test]
fn nccl_does_what_load_and_store_do_not() {
    on_gpus("nccl_does_what_load_and_store_do_not", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = Collectives::new(comm)?;
        let algorithm =
            |data_type, count, op| collectives.all_reduce_algorithm(data_type, count, op);
        assert_eq!(algorithm(DataType::Int32, 4, ReduceOp::Sum), Algorithm::Nccl);
        assert_eq!(algorithm(DataType::Float32, 4, ReduceOp::Prod), Algorithm::Nccl);
        assert_eq!(algorithm(DataType::Float32, 0, ReduceOp::Sum), Algorithm::Nccl);
        assert_eq!(algorithm(DataType::Float32, usize::MAX, ReduceOp::Sum), Algorithm::Nccl);
        let data = comm.mem_alloc::<i32>(4)?;
        data.copy_from_host(&[i32::MIN, 1, 2, 3 + rank.rank() as i32])?;
        collectives.all_reduce(&data, &data, ReduceOp::Max, &stream)?;
        stream.synchronize()?;
        let mut got = [0; 4];
        data.copy_to_host(&mut got)?;
        assert_eq!(got, [i32::MIN, 1, 2, 4]);
        Ok(())
    });
}

#[test]
fn other_lengths_and_contexts_are_refused() {
    on_gpus("other_lengths_and_contexts_are_refused", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = Collectives::new(comm)?;
        let (send, recv) = (comm.mem_alloc::<f32>(4)?, comm.mem_alloc::<f32>(5)?);
        let refused = collectives.all_reduce(&send, &recv, ReduceOp::Sum, &stream);
        let message = refused.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(message.contains("4 elements has 5 results"), "{message}");
        Ok(())
    });
}
