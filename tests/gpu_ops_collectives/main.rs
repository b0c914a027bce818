//! Tests of `devcomm::Collectives`.

mod absent;
mod any;
mod captured;
mod checked;
mod concurrent;
mod edges;
mod ended;
mod exchange;
mod long;
mod numbers;
mod older;
mod opposite;
mod pull;
mod ranks;
mod repeated;
mod uneven;

use devcomm::{
    Algorithm, Buffer, Collective, Collectives, CollectivesOptions, DeviceSlice, Element, F8E4M3,
    Rank, ReduceOp, Result, Simulation, Stream,
};
use devcomm_testing::machines::{Gpus, on_gpus};
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
    F8E4M3 e4m3_to_f32, F8E4M3::from_f32;
}

fn e4m3_to_f32(value: F8E4M3) -> f32 {
    value.to_f32()
}

/// Returns element `i` of the data that `rank` sends in a launch.
fn sent(rank: usize, launch: usize, i: usize) -> i32 {
    ((rank * 5 + launch * 3 + i) % 17) as i32 - 8
}

/// Returns the reduction of the elements that all ranks send.
fn reduced(op: ReduceOp, all: impl ExactSizeIterator<Item = i32>) -> f32 {
    let ranks = all.len() as f32;
    match op {
        ReduceOp::Max => all.max().unwrap_or(0) as f32,
        ReduceOp::Min => all.min().unwrap_or(0) as f32,
        ReduceOp::Avg => all.sum::<i32>() as f32 / ranks,
        _ => all.sum::<i32>() as f32,
    }
}

/// The memory of an all-reduce.
struct Sent<T> {
    send: DeviceSlice<T>,
    /// `None` stands for an all-reduce in place. The memory has one more element than `send`, which
    /// stays as it is.
    recv: Option<DeviceSlice<T>>,
}

impl<T: Number> Sent<T> {
    /// Fills the memory for launch number `launch`.
    fn new(
        rank: &Rank,
        launch: usize,
        send: DeviceSlice<T>,
        recv: Option<DeviceSlice<T>>,
    ) -> Result<Self> {
        let element = |i| T::of(sent(rank.rank(), launch, i));
        send.copy_from_host(&(0..send.len()).map(element).collect::<Vec<_>>())?;
        if let Some(recv) = &recv {
            recv.fill_bytes(0xff)?;
        }
        Ok(Self { send, recv })
    }

    fn all_reduce(
        &self,
        collectives: &Collectives,
        op: ReduceOp,
        by: Algorithm,
        stream: &Stream,
    ) -> Result<()> {
        let recv = match &self.recv {
            Some(recv) => recv.slice(..self.send.len())?,
            None => self.send.clone(),
        };
        let how = collectives.explain(&Collective::all_reduce(&self.send, &recv, op))?;
        assert_eq!(how.plan.algorithm, by, "{how}");
        collectives.all_reduce(&self.send, &recv, op, stream)
    }

    fn check(&self, rank: &Rank, launch: usize, op: ReduceOp) -> Result<()> {
        let result = self.recv.as_ref().unwrap_or(&self.send);
        let mut got = vec![T::of(0); result.len()];
        result.copy_to_host(&mut got)?;
        let count = self.send.len();
        for (i, got) in got.iter().enumerate().take(count) {
            let all = (0..rank.n_ranks()).map(|rank| sent(rank, launch, i));
            assert_eq!(got.value(), reduced(op, all), "{op:?} {launch}: element {i} of {count}");
        }
        assert!(got[count..].iter().all(|x| x.value().is_nan()), "{launch}: wrote past the end");
        Ok(())
    }
}

/// Runs all-reduces of changing lengths, one after the other without a wait, in and out of place.
fn short<T: Number>(rank: &Rank, op: ReduceOp, counts: &[usize]) -> Result<()> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let collectives = Collectives::new(comm)?;
    let mut all = Vec::new();
    for (launch, &count) in counts.iter().enumerate() {
        let skip = launch % 2;
        let send = comm.mem_alloc::<T>(skip + count)?.slice(skip..)?;
        let recv = match launch % 3 {
            0 => None,
            _ => Some(comm.mem_alloc::<T>(count + 1)?.device_slice()),
        };
        all.push(Sent::new(rank, launch, send, recv)?);
    }
    for sent in &all {
        sent.all_reduce(&collectives, op, Algorithm::Lamport, &stream)?;
    }
    stream.synchronize()?;
    all.iter().enumerate().try_for_each(|(launch, sent)| sent.check(rank, launch, op))
}

/// Returns lengths around those of vectors, of blocks and of earlier launches.
fn short_counts(rank: &Rank) -> Vec<usize> {
    let most = if rank.n_ranks() == 2 { 1 << 24 } else { 1 << 18 };
    match rank.is_simulated() {
        true => vec![1, 100, 7, 8, 300, 1, 1, 1025, 3, 64],
        false => vec![1, 100, 7, most, 300, 1, 1, 100_003, 3, 8192, most, 64, 5, 4096],
    }
}

#[test]
fn short_all_reduces_follow_each_other() {
    for ranks in [2, 4] {
        on_gpus("short_all_reduces_follow_each_other", ranks, |rank| {
            let counts = short_counts(rank);
            short::<f32>(rank, ReduceOp::Sum, &counts)?;
            short::<bf16>(rank, ReduceOp::Max, &counts)?;
            short::<f16>(rank, ReduceOp::Min, &counts[..4])?;
            short::<bf16>(rank, ReduceOp::Avg, &counts[..4])
        });
    }
    // A thread has several vectors.
    let small = Gpus::from(Simulation::new(2).multiprocessors(1).seed(1).preempt(true));
    small.run("short_all_reduces_follow_each_other", |rank| {
        short::<f32>(rank, ReduceOp::Sum, &[30_000, 1, 9_001, 30_000])
    });
}

/// A graph of all-reduces of ten lengths is replayed with other data each time.
#[test]
fn ten_thousand_all_reduces_of_changing_data_are_right() {
    on_gpus("ten_thousand_all_reduces_of_changing_data_are_right", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = Collectives::new(comm)?;
        let mut memory = Vec::new();
        for count in [1, 3, 64, 257, 1000, 1024, 2048, 4099, 8192, 30_000] {
            let recv = comm.mem_alloc::<f32>(count + 1)?.device_slice();
            memory.push((comm.mem_alloc::<f32>(count)?.device_slice(), recv));
        }
        let fill = |replay| {
            let sent = |(send, recv): &(DeviceSlice<f32>, DeviceSlice<f32>)| {
                Sent::new(rank, replay, send.clone(), Some(recv.clone()))
            };
            memory.iter().map(sent).collect::<Result<Vec<_>>>()
        };
        let (all, op) = (fill(0)?, ReduceOp::Sum);
        let graph = stream.capture(|| {
            let launch =
                |sent: &Sent<_>| sent.all_reduce(&collectives, op, Algorithm::Lamport, &stream);
            all.iter().try_for_each(launch)
        })?;
        for replay in 0..if rank.is_simulated() { 3 } else { 1000 } {
            let all = fill(replay)?;
            graph.launch(&stream)?;
            stream.synchronize()?;
            all.iter().try_for_each(|sent| sent.check(rank, replay, op))?;
        }
        Ok(())
    });
}

/// Runs long all-reduces on windows, in and out of place, one after the other without a wait.
fn long<T: Number>(rank: &Rank, op: ReduceOp) -> Result<()> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    // The lengths need one round, or several.
    let options = CollectivesOptions::new().lamport_bytes(16);
    let (options, counts) = match rank.is_simulated() {
        true => (options.push_blocks(1), vec![140, 200_003, 201, 164, 140_000]),
        false => (options, vec![9 << 20, (64 << 20) + 3, (16 << 20) + 1, 9 << 20]),
    };
    let collectives = options.build(comm)?;
    let mut all = Vec::new();
    for (launch, &count) in counts.iter().enumerate() {
        // The first two are not at the start of their windows.
        let skip = if launch < 2 { 16 / size_of::<T>() } else { 0 };
        let window = |len: usize| comm.window::<T>(skip + len)?.slice(skip..);
        let (send, recv) = match launch % 2 {
            0 => (window(count)?, Some(window(count + 1)?)),
            _ => (window(count)?, None),
        };
        all.push(Sent::new(rank, launch, send, recv)?);
    }
    // Peers write to the windows from now on.
    rank.barrier()?;
    for sent in &all {
        // No reduction is as large as 200. The stream orders the fill before the peers' stores.
        if let Some(recv) = &sent.recv {
            stream.fill(&recv.slice(..sent.send.len())?, T::of(200))?;
        }
        sent.all_reduce(&collectives, op, Algorithm::Push, &stream)?;
    }
    stream.synchronize()?;
    all.iter().enumerate().try_for_each(|(launch, sent)| sent.check(rank, launch, op))
}

#[test]
fn long_all_reduces_follow_each_other() {
    for ranks in [2, 4] {
        on_gpus("long_all_reduces_follow_each_other", ranks, |rank| {
            long::<f32>(rank, ReduceOp::Sum)?;
            long::<bf16>(rank, ReduceOp::Max)
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
        // On one rank, a word of two elements has the bits of an empty slot: both ranks get zeros.
        let own = if rank.rank() == 0 { [0.0, -0.0] } else { [-0.0, -0.0] };
        let data = comm.mem_alloc::<bf16>(2)?;
        data.copy_from_host(&own.map(bf16::from_f32))?;
        collectives.all_reduce(&data, &data, ReduceOp::Sum, &stream)?;
        stream.synchronize()?;
        let mut got = [bf16::NAN; 2];
        data.copy_to_host(&mut got)?;
        assert_eq!(got.map(bf16::to_bits), [0; 2]);
        Ok(())
    });
}

#[test]
fn nccl_does_what_load_and_store_do_not() {
    on_gpus("nccl_does_what_load_and_store_do_not", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = Collectives::new(comm)?;
        let floats = comm.mem_alloc::<f32>(17 << 20)?;
        for (op, reason) in [
            (ReduceOp::Prod, "nccl, as no kernel reduces this type by this operator"),
            (
                ReduceOp::Sum,
                "nccl, as the message is too long for one step, and not aligned in a window",
            ),
        ] {
            let how = collectives.explain(&Collective::all_reduce(&floats, &floats, op))?;
            assert_eq!(how.to_string(), reason);
        }
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

/// Each rank's elements are multiplied by a scalar of its own.
#[test]
fn scaled_elements_are_summed() {
    on_gpus("scaled_elements_are_summed", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = Collectives::new(comm)?;
        let data = comm.mem_alloc::<bf16>(100)?;
        data.copy_from_host(&[bf16::from_f32(3.0); 100])?;
        let by = bf16::from_f32([2.0, -0.5][rank.rank()]);
        let operator = comm.pre_mul_sum(by)?;
        let how = collectives.explain(&Collective::all_reduce(&data, &data, &operator))?;
        assert_eq!(how.plan.algorithm, Algorithm::Lamport, "{how}");
        collectives.all_reduce(&data, &data, &operator, &stream)?;
        stream.synchronize()?;
        let mut got = [bf16::ZERO; 100];
        data.copy_to_host(&mut got)?;
        assert_eq!(got, [bf16::from_f32(4.5); 100]);
        // NCCL alone accepts a scalar in device memory, and neither accepts a closed operator.
        let operator = comm.pre_mul_sum_from(&data.slice(..1)?)?;
        let how = collectives.explain(&Collective::all_reduce(&data, &data, &operator))?;
        assert_eq!(how.plan.algorithm, Algorithm::Nccl, "{how}");
        operator.close()?;
        let refused = collectives.all_reduce(&data, &data, &operator, &stream);
        let message = refused.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(message.contains("operator"), "{message}");
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
        assert!(message.contains("from 4 elements to 5"), "{message}");
        Ok(())
    });
}

/// Returns RMSNorm of a row as it is defined, computed in f64.
fn normalised(sum: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mean = sum.iter().map(|x| x * x).sum::<f64>() / sum.len() as f64;
    sum.iter().zip(weight).map(|(x, w)| x * w / (mean + eps).sqrt()).collect()
}

/// Checks all-reduces with RMSNorm of `tokens` rows: one with 8-bit results if there is a `scale`,
/// else two in succession with the same residual.
fn normalises<T: Number>(
    rank: &Rank,
    tokens: usize,
    hidden: usize,
    rounding: f64,
    scale: Option<f32>,
) -> Result<()> {
    let (comm, stream) = (rank.communicator()?, rank.stream()?);
    let collectives = Collectives::new(comm)?;
    let count = tokens * hidden;
    let elements = |x: &dyn Fn(usize) -> i32| (0..count).map(|i| T::of(x(i))).collect::<Vec<_>>();
    let buffer = |elements: &[T]| {
        let buffer = comm.mem_alloc::<T>(elements.len())?;
        buffer.copy_from_host(elements)?;
        Ok::<_, devcomm::Error>(buffer)
    };
    let input = buffer(&elements(&|i| sent(rank.rank(), 0, i)))?;
    let residual = buffer(&elements(&|i| (i % 5) as i32))?;
    let weight = buffer(&elements(&|i| (i % 3) as i32 + 1)[..hidden])?;
    let eps = 0.25;
    let (got, launches) = if let Some(scale) = scale {
        let (output, scales) = (comm.mem_alloc::<F8E4M3>(count)?, comm.mem_alloc(1)?);
        scales.copy_from_host(&[scale])?;
        let to = (&output, &scales);
        collectives.all_reduce_rmsnorm_quantised(&input, &residual, &weight, to, eps, &stream)?;
        stream.synchronize()?;
        (values(&output)?, 1)
    } else {
        let output = buffer(&elements(&|_| 0))?;
        for _ in 0..2 {
            collectives.all_reduce_rmsnorm(&input, &residual, &weight, &output, eps, &stream)?;
        }
        stream.synchronize()?;
        (values(&output)?, 2)
    };
    let left = values(&residual)?;
    let weight: Vec<f64> = (0..hidden).map(|i| (i % 3 + 1) as f64).collect();
    for token in 0..tokens {
        let row = token * hidden..(token + 1) * hidden;
        let sum: Vec<f64> = row
            .clone()
            .map(|i| {
                let all: i32 = (0..rank.n_ranks()).map(|rank| sent(rank, 0, i)).sum();
                f64::from(launches * all) + (i % 5) as f64
            })
            .collect();
        assert_eq!(left[row.clone()], sum, "token {token} of {tokens} x {hidden}");
        for (got, want) in got[row].iter().zip(normalised(&sum, &weight, eps.into())) {
            let [from, to] = [-rounding, rounding].map(|error| match scale {
                Some(scale) => quantised(want * (1.0 + error * want.signum()), scale),
                None => want + error * want.abs(),
            });
            let wrong = *got < from || *got > to || got.is_nan();
            assert!(!wrong, "token {token} of {tokens} x {hidden}: {got} and not {want}");
        }
    }
    // The largest sums saturate where the scale is small.
    assert_eq!(got.contains(&448.0), scale.is_some_and(|scale| scale < 0.1));
    Ok(())
}

fn values<T: Number>(buffer: &impl Buffer<Element = T>) -> Result<Vec<f64>> {
    let slice = buffer.device_slice();
    let mut elements = vec![T::of(0); slice.len()];
    slice.copy_to_host(&mut elements)?;
    Ok(elements.into_iter().map(|x| f64::from(x.value())).collect())
}

/// Returns the value of the 8-bit float that stands for `x`.
fn quantised(x: f64, scale: f32) -> f64 {
    let quotient = (x / f64::from(scale)).clamp(-448.0, 448.0);
    f64::from(F8E4M3::from_f32(quotient as f32).to_f32())
}

/// Bounds of the relative errors of RMSNorm: the root and the division round in f32, and the result
/// of another type is rounded once more, by half a step.
const F32_ERROR: f64 = 16.0 / (1 << 23) as f64;
const F16_ERROR: f64 = 1.01 / 2048.0;
const BF16_ERROR: f64 = 1.01 / 256.0;

#[test]
fn all_reduces_with_rmsnorm() {
    for ranks in [2, 3, 4] {
        on_gpus("all_reduces_with_rmsnorm", ranks, |rank| {
            normalises::<f32>(rank, 3, 64, F32_ERROR, None)?;
            normalises::<f16>(rank, 2, 264, F16_ERROR, None)?;
            normalises::<bf16>(rank, 2, 2056, BF16_ERROR, None)?;
            // In 8-bit floats the largest results saturate, or the smallest are subnormal.
            normalises::<f32>(rank, 1, 20, F32_ERROR, Some(0.01))?;
            normalises::<f16>(rank, 3, 72, F32_ERROR, Some(37.0))?;
            normalises::<bf16>(rank, 2, 264, F32_ERROR, Some(0.01))?;
            if rank.is_simulated() {
                return Ok(());
            }
            // The last of these has more tokens than the messages hold; the others need one step.
            for tokens in [64, 128, 256, 300] {
                normalises::<bf16>(rank, tokens, 8192, BF16_ERROR, None)?;
                normalises::<bf16>(rank, tokens, 8192, 2.0 * F32_ERROR, Some(0.01))?;
            }
            Ok(())
        });
    }
}

#[test]
fn more_tokens_than_resident_blocks_are_normalised() {
    for ranks in [2, 4] {
        let gpus = Gpus::from(Simulation::new(ranks).multiprocessors(2));
        gpus.run("more_tokens_than_resident_blocks_are_normalised", |rank| {
            // The messages hold all tokens, but the GPU does not have a block for each at once.
            // With two ranks, blocks have several rows; with more, RMSNorm follows the all-reduce.
            let tokens = if rank.is_simulated() { 100 } else { 4500 };
            normalises::<f32>(rank, tokens, 4, F32_ERROR, None)?;
            normalises::<bf16>(rank, 7, 2056, 2f64.powi(-7), None)
        });
    }
}

#[test]
fn where_rmsnorm_follows_an_all_reduce_the_plan_is_that_of_the_all_reduce() {
    let name = "where_rmsnorm_follows_an_all_reduce_the_plan_is_that_of_the_all_reduce";
    on_gpus(name, 2, |rank| {
        let comm = rank.communicator()?;
        let collectives = CollectivesOptions::new().lamport_bytes(1024).build(comm)?;
        let weight = comm.mem_alloc::<f32>(64)?;
        for (tokens, follows) in [(1, false), (1000, true)] {
            let (x, residual) = (comm.window::<f32>(64 * tokens)?, comm.mem_alloc(64 * tokens)?);
            let normalise = Collective::all_reduce_rmsnorm(&x, &residual, &weight, &x);
            let how = collectives.explain(&normalise)?;
            assert_eq!(how.reason.contains("RMSNorm follows an all-reduce"), follows, "{how}");
            let all_reduce = collectives.explain(&Collective::all_reduce(&x, &x, ReduceOp::Sum))?;
            assert_eq!(how.plan.algorithm, all_reduce.plan.algorithm, "{how}; {all_reduce}");
            assert_ne!(how.plan.algorithm, Algorithm::Nccl);
        }
        Ok(())
    });
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    on_gpus("rows_that_do_not_fit_are_refused", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = Collectives::new(comm)?;
        let rows = |count, hidden| {
            let (x, weight) = (comm.mem_alloc::<f32>(count)?, comm.mem_alloc::<f32>(hidden)?);
            collectives.all_reduce_rmsnorm(&x, &comm.mem_alloc(count)?, &weight, &x, 0.1, &stream)
        };
        for (count, hidden) in [(8, 6), (10, 4), (16384, 16384)] {
            let message = rows(count, hidden).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(message.contains("rows have whole vectors"), "{message}");
        }
        let (x, weight) = (comm.mem_alloc::<f32>(16)?, comm.mem_alloc::<f32>(8)?);
        let (bytes, scale) = (comm.mem_alloc::<F8E4M3>(32)?, comm.mem_alloc::<f32>(1)?);
        for (output, scales, reason) in [
            (0..15, 1, "the output has 15 elements"),
            (8..24, 1, "the output begins at"),
            (0..16, 0, "the scale has 0 elements"),
        ] {
            let (output, scale) = (bytes.slice(output)?, scale.slice(..scales)?);
            let (residual, to) = (comm.mem_alloc(16)?, (&output, &scale));
            let refused =
                collectives.all_reduce_rmsnorm_quantised(&x, &residual, &weight, to, 0.1, &stream);
            let message = refused.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(message.contains(reason), "{message}");
        }
        Ok(())
    });
}

#[test]
fn a_plan_that_is_set_is_used_where_it_can_be() {
    on_gpus("a_plan_that_is_set_is_used_where_it_can_be", 2, |rank| {
        let (comm, stream) = (rank.communicator()?, rank.stream()?);
        let collectives = Collectives::new(comm)?;
        // There are plans by messages, by stores in rounds, by loads, and by NCCL.
        let (send, recv) = (comm.window::<f32>(300)?, comm.window::<f32>(301)?);
        let recv_slice = recv.slice(..300)?;
        let call = Collective::all_reduce(&send, &recv_slice, ReduceOp::Sum);
        let plans = collectives.plans(&call)?;
        assert_eq!(collectives.explain(&call)?.plan, plans[0]);
        let algorithms: Vec<_> = plans.iter().map(|plan| plan.algorithm).collect();
        for by in [Algorithm::Lamport, Algorithm::Push, Algorithm::Pull, Algorithm::Nccl] {
            assert!(algorithms.contains(&by), "{by}: {algorithms:?}");
        }
        for (launch, plan) in plans.into_iter().enumerate() {
            // Grids of many blocks take long on simulated GPUs.
            if plan.blocks > 16 && rank.is_simulated() {
                continue;
            }
            collectives.set_plan(Some(plan));
            let sent = Sent::new(rank, launch, send.device_slice(), Some(recv.device_slice()))?;
            rank.barrier()?;
            sent.all_reduce(&collectives, ReduceOp::Sum, plan.algorithm, &stream)?;
            stream.synchronize()?;
            sent.check(rank, launch, ReduceOp::Sum)?;
            // No kernel multiplies.
            let product = Collective::all_reduce(&send, &send, ReduceOp::Prod);
            assert_eq!(collectives.explain(&product)?.plan.algorithm, Algorithm::Nccl);
        }
        Ok(())
    });
}
