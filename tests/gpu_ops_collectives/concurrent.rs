//! Tests of operations of several [`Collectives`] that run concurrently.

use std::time::Duration;

use devcomm::{
    Algorithm, Buffer, CollectivePlan, Collectives, CollectivesOptions, Error, Parts, Rank,
    ReduceOp, Result, Simulation, Stream, SymmetricBuffer, Window,
};
use devcomm_testing::machines::Gpus;

/// An object with a stream and windows of its own.
struct Lane {
    collectives: Collectives,
    stream: Stream,
    send: Window<f32>,
    recv: Window<f32>,
    /// The buffers of an all-reduce with RMSNorm.
    residual: SymmetricBuffer<f32>,
    weight: SymmetricBuffer<f32>,
    output: Window<f32>,
}

/// The elements of a row of RMSNorm.
const HIDDEN: usize = 64;

impl Lane {
    fn new(rank: &Rank, count: usize, objects: u32) -> Result<Self> {
        let comm = rank.communicator()?;
        // On simulated GPUs a small buffer is zeroed faster, and makes few elements long messages.
        let options = CollectivesOptions::new().concurrent(objects);
        let options = if rank.is_simulated() { options.lamport_bytes(1024) } else { options };
        let lane = Self {
            collectives: options.build(comm)?,
            stream: rank.stream()?,
            send: comm.window(count)?,
            recv: comm.window(count)?,
            residual: comm.mem_alloc(count)?,
            weight: comm.mem_alloc(HIDDEN)?,
            output: comm.window(count)?,
        };
        lane.stream.fill(&lane.send.slice(..)?, 1.0 + rank.rank() as f32)?;
        lane.stream.fill(&lane.residual, 1.0)?;
        lane.stream.fill(&lane.weight, 1.0)?;
        lane.stream.synchronize()?;
        Ok(lane)
    }

    /// Enqueues all operations of `count` elements: by Lamport messages, by pushes and by loads.
    fn enqueue(&self, count: usize, ranks: usize) -> Result<()> {
        let Self { collectives, stream, .. } = self;
        let (send, recv) = (self.send.slice(..count)?, self.recv.slice(..count)?);
        let per_rank = count / ranks;
        collectives.all_reduce(&send, &recv, ReduceOp::Sum, stream)?;
        collectives.all_gather(&send.slice(..per_rank)?, &recv, stream)?;
        collectives.reduce_scatter(&send, &recv.slice(..per_rank)?, ReduceOp::Sum, stream)?;
        collectives.all_to_all(&send, &recv, stream)?;
        let offsets: Vec<_> = (0..ranks).map(|rank| rank * per_rank).collect();
        let parts = Parts { counts: &vec![per_rank; ranks], offsets: &offsets };
        collectives.all_to_all_v(&send, parts, &recv, parts, stream)?;
        // NCCL does longer broadcasts of more than two ranks.
        let moved = if ranks == 2 { count } else { count.min(256) };
        collectives.broadcast(Some(send.slice(..moved)?), &recv.slice(..moved)?, 0, stream)?;
        let [residual, output] = [self.residual.slice(..count)?, self.output.slice(..count)?];
        let weight = &self.weight;
        collectives.all_reduce_rmsnorm(&send, &residual, weight, &output, 0.0, stream)?;
        for algorithm in [Algorithm::Pull, Algorithm::Push] {
            let plan = CollectivePlan { algorithm, blocks: 2, threads: 64 };
            collectives.set_plan(Some(plan));
            collectives.all_reduce(&send, &recv, ReduceOp::Sum, stream)?;
        }
        collectives.set_plan(None);
        collectives.all_reduce(&send, &recv, ReduceOp::Sum, stream)
    }

    fn require_sums(&self, count: usize, ranks: usize) -> Result<()> {
        self.stream.synchronize_within(Duration::from_secs(20))?;
        let sum = (ranks * (ranks + 1) / 2) as f32;
        let mut got = vec![0.0; count];
        self.recv.slice(..count)?.copy_to_host(&mut got)?;
        assert!(got.iter().all(|&value| value == sum), "{count} elements: {}", got[0]);
        // The elements of a row are equal, and so become 1.
        self.output.slice(..count)?.copy_to_host(&mut got)?;
        assert!(got.iter().all(|value| (value - 1.0).abs() < 1e-5), "RMSNorm: {}", got[0]);
        Ok(())
    }
}

/// Calls the operations of all objects, on each rank in another order.
fn run_in_any_order(rank: &Rank, objects: u32, counts: &[usize]) -> Result<(), Error> {
    let most = counts.iter().copied().max().unwrap();
    let lanes = (0..objects).map(|_| Lane::new(rank, most, objects));
    let mut lanes: Vec<_> = lanes.collect::<Result<_>>()?;
    lanes.rotate_left(rank.rank() % objects as usize);
    for &count in counts {
        for _ in 0..3 {
            lanes.iter().try_for_each(|lane| lane.enqueue(count, rank.n_ranks()))?;
        }
        lanes.iter().try_for_each(|lane| lane.require_sums(count, rank.n_ranks()))?;
        rank.barrier()?;
    }
    Ok(())
}

#[test]
fn operations_of_several_objects_end_in_any_order_of_calls() {
    for (ranks, objects, seed) in [(2, 2, 1), (2, 3, 2), (4, 2, 3), (2, 4, 4)] {
        let simulation = Simulation::new(ranks).multiprocessors(2).seed(seed);
        let gpus = Gpus::from(simulation).unchecked();
        gpus.run("operations_of_several_objects_end", |rank| {
            let counts = match rank.is_simulated() {
                true => &[64, 2048][..],
                false => &[256, 64 << 10, 1 << 20, 32 << 20],
            };
            run_in_any_order(rank, objects, counts)
        });
    }
}

/// The launches of an object that may fill the GPU begin before the previous ones have ended, any
/// number of them. The operations of a second such object wait for them.
#[test]
fn operations_of_objects_that_fill_the_gpu_follow_each_other() {
    for (ranks, seed) in [(2, 1), (4, 2)] {
        let simulation = Simulation::new(ranks).multiprocessors(2).seed(seed);
        Gpus::from(simulation).run("operations_of_objects_that_fill_the_gpu", |rank| {
            let most = if rank.is_simulated() { 2048 } else { 32 << 20 };
            let lanes = [Lane::new(rank, most, 1)?, Lane::new(rank, most, 1)?];
            for count in [64, most] {
                for _ in 0..3 {
                    lanes.iter().try_for_each(|lane| lane.enqueue(count, ranks))?;
                    lanes[0].enqueue(count, ranks)?;
                }
                lanes.iter().try_for_each(|lane| lane.require_sums(count, ranks))?;
                rank.barrier()?;
            }
            Ok(())
        });
    }
}

#[test]
fn a_number_of_objects_that_no_gpu_has_room_for_is_refused() {
    Gpus::new(2).run("a_number_of_objects_is_refused", |rank| {
        for objects in [0, 5] {
            let refused = CollectivesOptions::new().concurrent(objects);
            let error = refused.build(rank.communicator()?).unwrap_err().to_string();
            assert!(error.contains("it is 1 to 4"), "{error}");
        }
        Ok(())
    });
}
