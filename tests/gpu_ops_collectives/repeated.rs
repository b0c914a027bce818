//! Tests every collective in a graph that is replayed with other data each time.

use devcomm::{
    Algorithm, Buffer, Collective, Collectives, CollectivesOptions, DeviceSlice, Rank, ReduceOp,
    Result, Stream,
};
use devcomm_testing::machines::on_gpus;

use super::{normalised, reduced, sent};

/// Elements of a message.
const COUNT: usize = 1000;
const EPS: f32 = 0.25;

/// An operation. Each rank's memory to send has a message for every rank.
#[derive(Clone, Copy)]
enum Operation {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast(usize),
    RmsNorm,
}
use Operation::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter, RmsNorm};

/// An operation with its memory: windows, and the residual and the weight of RMSNorm.
struct Call {
    operation: Operation,
    send: DeviceSlice<f32>,
    residual: DeviceSlice<f32>,
    weight: DeviceSlice<f32>,
    recv: DeviceSlice<f32>,
}

impl Call {
    fn launch(&self, collectives: &Collectives, rank: usize, stream: &Stream) -> Result<()> {
        let Self { send, residual, weight, recv, .. } = self;
        let first = send.slice(..COUNT)?;
        match self.operation {
            AllReduce(op) => collectives.all_reduce(send, recv, op, stream),
            AllGather => collectives.all_gather(&first, recv, stream),
            ReduceScatter => {
                collectives.reduce_scatter(send, &recv.slice(..COUNT)?, ReduceOp::Sum, stream)
            }
            AllToAll => collectives.all_to_all(send, recv, stream),
            Broadcast(root) => {
                collectives.broadcast((rank == root).then(|| send.clone()), recv, root, stream)
            }
            RmsNorm => collectives.all_reduce_rmsnorm(send, residual, weight, recv, EPS, stream),
        }
    }

    /// Returns the operation as [`Collectives::explain`] takes it.
    fn as_collective(&self, rank: usize) -> Result<Collective<'_>> {
        let Self { send, residual, weight, recv, .. } = self;
        Ok(match self.operation {
            AllReduce(op) => Collective::all_reduce(send, recv, op),
            AllGather => Collective::all_gather(&send.slice(..COUNT)?, recv),
            ReduceScatter => Collective::reduce_scatter(send, &recv.slice(..COUNT)?, ReduceOp::Sum),
            AllToAll => Collective::all_to_all(send, recv),
            Broadcast(root) => {
                Collective::broadcast((rank == root).then(|| send.clone()), recv, root)
            }
            RmsNorm => Collective::all_reduce_rmsnorm(send, residual, weight, recv),
        })
    }

    /// Returns the elements that a rank receives.
    fn expected(&self, rank: usize, ranks: usize, replay: usize) -> Vec<f32> {
        let element = |from, i| sent(from, replay, i);
        let all = |op, i| reduced(op, (0..ranks).map(|from| element(from, i)));
        let one = |i: usize| match self.operation {
            AllReduce(op) => all(op, i),
            AllGather => element(i / COUNT, i % COUNT) as f32,
            ReduceScatter => all(ReduceOp::Sum, rank * COUNT + i),
            AllToAll => element(i / COUNT, rank * COUNT + i % COUNT) as f32,
            Broadcast(root) => element(root, i) as f32,
            RmsNorm => all(ReduceOp::Sum, i) + 1.0,
        };
        let count = if matches!(self.operation, ReduceScatter) { COUNT } else { ranks * COUNT };
        let expected: Vec<f32> = (0..count).map(one).collect();
        match self.operation {
            RmsNorm => expected
                .chunks(COUNT)
                .flat_map(|row| {
                    let row: Vec<f64> = row.iter().copied().map(f64::from).collect();
                    normalised(&row, &[2.0; COUNT], EPS.into())
                })
                .map(|x| x as f32)
                .collect(),
            _ => expected,
        }
    }

    fn check(&self, rank: &Rank, by: Algorithm, replay: usize) -> Result<()> {
        let expected = self.expected(rank.rank(), rank.n_ranks(), replay);
        let mut got = vec![f32::NAN; expected.len()];
        self.recv.slice(..expected.len())?.copy_to_host(&mut got)?;
        // Only RMSNorm rounds, in f32.
        let error = if matches!(self.operation, RmsNorm) { 1e-6 } else { 0.0 };
        for (i, (got, want)) in got.into_iter().zip(expected).enumerate() {
            let is_right = (got - want).abs() <= error * want.abs();
            assert!(is_right, "{by}, replay {replay}: element {i} is {got} and not {want}");
        }
        Ok(())
    }
}

#[test]
fn a_thousand_replays_of_every_collective_are_right() {
    on_gpus("a_thousand_replays_of_every_collective_are_right", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let short = Collectives::new(comm)?;
        let long = CollectivesOptions::new().lamport_bytes(64).push_blocks(2).build(comm)?;
        let len = rank.n_ranks() * COUNT;
        let window = || comm.window::<f32>(len)?.slice(..);
        let (send, weight) = (window()?, comm.mem_alloc::<f32>(COUNT)?.slice(..)?);
        weight.copy_from_host(&[2.0; COUNT])?;
        let mut calls = Vec::new();
        for (collectives, is_short) in [(&short, true), (&long, false)] {
            for (operation, by) in [
                (AllReduce(ReduceOp::Sum), Algorithm::Push),
                (AllReduce(ReduceOp::Max), Algorithm::Push),
                (AllGather, Algorithm::Push),
                (ReduceScatter, Algorithm::Pull),
                (AllToAll, Algorithm::Push),
                (Broadcast(0), Algorithm::Push),
                (Broadcast(1), Algorithm::Push),
                (RmsNorm, Algorithm::Lamport),
            ] {
                // RMSNorm has one kernel.
                let by = if is_short { Algorithm::Lamport } else { by };
                if !is_short && matches!(operation, RmsNorm) {
                    continue;
                }
                let (send, weight) = (send.clone(), weight.clone());
                let (residual, recv) = (comm.mem_alloc::<f32>(len)?.slice(..)?, window()?);
                let call = Call { operation, send, residual, weight, recv };
                let how = collectives.explain(&call.as_collective(rank.rank())?)?;
                assert_eq!(how.plan.algorithm, by, "{how}");
                calls.push((collectives, by, call));
            }
        }
        let graph = stream.capture(|| {
            let launch = |(collectives, _, call): &(&Collectives, _, Call)| {
                call.launch(collectives, rank.rank(), &stream)
            };
            calls.iter().try_for_each(launch)
        })?;
        for replay in 0..if rank.is_simulated() { 3 } else { 1000 } {
            let own: Vec<f32> = (0..len).map(|i| sent(rank.rank(), replay, i) as f32).collect();
            send.copy_from_host(&own)?;
            calls
                .iter()
                .try_for_each(|(_, _, call)| call.residual.copy_from_host(&vec![1.0; len]))?;
            // Peers write to this rank's memory, and load from it.
            rank.barrier()?;
            graph.launch(&stream)?;
            stream.synchronize()?;
            rank.barrier()?;
            calls.iter().try_for_each(|(_, by, call)| call.check(rank, *by, replay))?;
        }
        Ok(())
    });
}

/// The operation is captured on another stream, as torch captures graphs on a stream of their own.
#[test]
fn an_operation_is_captured_after_one_on_another_stream() {
    on_gpus("an_operation_is_captured_after_one_on_another_stream", 2, |rank| {
        let (comm, streams) = (rank.communicator()?, [rank.stream()?, rank.stream()?]);
        let (collectives, op) = (Collectives::new(comm)?, ReduceOp::Sum);
        let (first, captured) = (comm.window::<f32>(100)?, comm.window::<f32>(100)?);
        streams[0].fill(&first, 1.0)?;
        collectives.all_reduce(&first, &first, op, &streams[0])?;
        assert!(!streams[1].is_capturing()?);
        let graph = streams[1].capture(|| {
            assert!(streams[1].is_capturing()?);
            collectives.all_reduce(&captured, &captured, op, &streams[1])
        })?;
        streams[0].synchronize()?;
        for replay in 0..3 {
            streams[1].fill(&captured, replay as f32)?;
            graph.launch(&streams[1])?;
            streams[1].synchronize()?;
            collectives.all_reduce(&first, &first, op, &streams[0])?;
            streams[0].synchronize()?;
            let mut sums = [[0.0; 100]; 2];
            streams[0].copy_to_host(&first, &mut sums[0])?;
            streams[0].copy_to_host(&captured, &mut sums[1])?;
            assert_eq!(sums, [[4.0 * (1 << replay) as f32; 100], [2.0 * replay as f32; 100]]);
        }
        Ok(())
    });
}
