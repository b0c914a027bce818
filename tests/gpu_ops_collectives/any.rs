//! Tests of all-reduces of integers, f64 and 8-bit floats, whose results are compared bit by bit.

use std::fmt::Debug;

use devcomm::{
    Algorithm, Buffer, Collective, Collectives, Element, F8E4M3, F8E5M2, Rank, ReduceOp, Result,
};
use devcomm_testing::machines::on_gpus;

/// An element with the reference of its reductions.
trait Number: Element + PartialEq + Debug {
    /// Returns element `i` of the data that a rank sends. Some have the bits of an empty slot.
    fn sent(rank: usize, i: usize) -> Self;
    fn reduced(op: ReduceOp, all: &[Self]) -> Self;
}

macro_rules! integers {
    ($($type:ident)*) => { $(
        impl Number for $type {
            fn sent(rank: usize, i: usize) -> Self {
                match i % 7 {
                    0 => $type::MIN,
                    1 => (0x8000_0000_8000_0000_u64 >> (rank % 2)) as $type,
                    _ => ((i as u64 + 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> rank) as $type,
                }
            }

            fn reduced(op: ReduceOp, all: &[Self]) -> Self {
                let all = all.iter().copied();
                let sum = || all.clone().fold(0, $type::wrapping_add);
                match op {
                    ReduceOp::Sum => sum(),
                    ReduceOp::Prod => all.fold(1, $type::wrapping_mul),
                    ReduceOp::Max => all.max().unwrap_or_default(),
                    ReduceOp::Min => all.min().unwrap_or_default(),
                    ReduceOp::Avg => sum() / all.len() as $type,
                }
            }
        }
    )* };
}

integers!(i8 u8 i32 u32 i64 u64);

macro_rules! floats {
    ($($type:ident: $from:expr, $to:expr;)*) => { $(
        impl Number for $type {
            /// Returns small numbers, whose results are exact; -0 has the bits of an empty slot.
            fn sent(rank: usize, i: usize) -> Self {
                $from(if i % 5 == 0 { -0.0 } else { ((rank * 5 + i) % 5) as f32 - 2.0 })
            }

            fn reduced(op: ReduceOp, all: &[Self]) -> Self {
                let (ranks, all) = (all.len() as f32, all.iter().map($to));
                $from(match op {
                    ReduceOp::Sum => all.sum(),
                    ReduceOp::Prod => all.product(),
                    ReduceOp::Max => all.fold(f32::MIN, f32::max),
                    ReduceOp::Min => all.fold(f32::MAX, f32::min),
                    ReduceOp::Avg => all.sum::<f32>() / ranks,
                })
            }
        }
    )* };
}

floats! {
    f64: f64::from, |x: &f64| *x as f32;
    F8E4M3: F8E4M3::from_f32, |x: &F8E4M3| x.to_f32();
    F8E5M2: F8E5M2::from_f32, |x: &F8E5M2| x.to_f32();
}

/// Runs all-reduces of several lengths with several operators, in and out of place.
fn reduce<T: Number>(rank: &Rank, collectives: &Collectives) -> Result<()> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    // There are slots for 1 MiB from each of four ranks.
    let largest = match (rank.is_simulated(), rank.n_ranks()) {
        (true, _) => 600,
        (false, 2) => 300_000,
        (false, _) => 100_000,
    };
    for (launch, (op, count)) in [
        (ReduceOp::Sum, largest),
        (ReduceOp::Prod, 1),
        (ReduceOp::Max, 497),
        (ReduceOp::Min, 3),
        (ReduceOp::Avg, 100),
    ]
    .into_iter()
    .enumerate()
    {
        let sent_by = |rank| (0..count).map(|i| T::sent(rank, i + launch)).collect::<Vec<_>>();
        let send = comm.mem_alloc::<T>(count)?.device_slice();
        let recv =
            if launch % 2 == 0 { send.clone() } else { comm.mem_alloc(count)?.device_slice() };
        send.copy_from_host(&sent_by(rank.rank()))?;
        let how = collectives.explain(&Collective::all_reduce(&send, &recv, op))?;
        assert_eq!(how.plan.algorithm, Algorithm::Lamport, "{how}");
        collectives.all_reduce(&send, &recv, op, &stream)?;
        stream.synchronize()?;
        let mut got = sent_by(rank.rank());
        recv.copy_to_host(&mut got)?;
        let all: Vec<_> = (0..rank.n_ranks()).map(sent_by).collect();
        for (i, got) in got.into_iter().enumerate() {
            let elements: Vec<_> = all.iter().map(|sent| sent[i]).collect();
            let expected = T::reduced(op, &elements);
            assert_eq!(got, expected, "{op:?} of {}, element {i} of {count}", T::NAME);
        }
    }
    Ok(())
}

#[test]
fn all_reduces_of_integers_and_other_floats_are_exact() {
    for ranks in [2, 4] {
        on_gpus("all_reduces_of_integers_and_other_floats_are_exact", ranks, |rank| {
            let collectives = Collectives::new(rank.communicator()?)?;
            reduce::<i8>(rank, &collectives)?;
            reduce::<u8>(rank, &collectives)?;
            reduce::<i32>(rank, &collectives)?;
            reduce::<u32>(rank, &collectives)?;
            reduce::<i64>(rank, &collectives)?;
            reduce::<u64>(rank, &collectives)?;
            reduce::<f64>(rank, &collectives)?;
            reduce::<F8E4M3>(rank, &collectives)?;
            reduce::<F8E5M2>(rank, &collectives)
        });
    }
}
