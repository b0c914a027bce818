//! Tests that all-reduces with RMSNorm, and products, are ordered around captures and replays, on
//! any stream.

use devcomm::{
    AllGatherGemm, AllGatherGemmPlan, Buffer, Collectives, CollectivesOptions, DeviceBuffer, Error,
    GemmAllReduce, GemmAllReducePlan, GemmReduceScatter, GemmReduceScatterPlan, Rank, Result,
    Simulation, Stream, SymmetricBuffer, Window,
};
use devcomm_testing::machines::Gpus;
use half::bf16;

const HIDDEN: usize = 256;
const TOKENS: usize = 5;

/// The buffers of an operation.
struct Lane {
    input: DeviceBuffer<f32>,
    residual: DeviceBuffer<f32>,
    weight: DeviceBuffer<f32>,
    output: DeviceBuffer<f32>,
}

impl Lane {
    fn new(rank: &Rank, number: usize) -> Result<Self> {
        let alloc = |len| rank.context().alloc::<f32>(len);
        let lane = Self {
            input: alloc(TOKENS * HIDDEN)?,
            residual: alloc(TOKENS * HIDDEN)?,
            weight: alloc(HIDDEN)?,
            output: alloc(TOKENS * HIDDEN)?,
        };
        let value = |i: usize| ((i * 7 + number * 3) % 11) as f32 - 4.0;
        let write = |to: &DeviceBuffer<f32>, shift: usize| {
            let values: Vec<_> = (0..to.len()).map(|i| value(i + shift)).collect();
            to.device_slice().copy_from_host(&values)
        };
        write(&lane.input, rank.rank())?;
        write(&lane.residual, 0)?;
        write(&lane.weight, 0)?;
        Ok(lane)
    }

    /// Enqueues an operation that adds the sum of all inputs to the residual.
    fn call(&self, collectives: &Collectives, stream: &Stream) -> Result<()> {
        let Self { input, residual, weight, output } = self;
        collectives.all_reduce_rmsnorm(input, residual, weight, output, 0.1, stream)
    }

    /// Returns the residual and the output.
    fn results(&self) -> Result<[Vec<f32>; 2]> {
        let read = |from: &DeviceBuffer<f32>| {
            let mut got = vec![0.0; from.len()];
            from.device_slice().copy_to_host(&mut got)?;
            Ok::<_, Error>(got)
        };
        Ok([read(&self.residual)?, read(&self.output)?])
    }
}

/// Enqueues operations on a first stream, captures one on a second, enqueues others on a third, and
/// calls one after each of two replays, on another stream.
fn is_ordered(rank: &Rank, concurrent: u32) -> Result<()> {
    let options = CollectivesOptions::new().concurrent(concurrent).lamport_bytes(16 << 10);
    let collectives = options.build(rank.communicator()?)?;
    let [first, second, third] = [rank.stream()?, rank.stream()?, rank.stream()?];
    let lanes = [Lane::new(rank, 0)?, Lane::new(rank, 1)?, Lane::new(rank, 2)?];
    let call = |lane: usize, stream| lanes[lane].call(&collectives, stream);
    (0..6).try_for_each(|_| call(0, &first))?;
    let graph = second.capture(|| call(1, &second))?;
    (0..6).try_for_each(|_| call(2, &third))?;
    graph.launch(&second)?;
    call(0, &first)?;
    graph.launch(&third)?;
    call(2, &second)?;
    [&first, &second, &third].into_iter().try_for_each(Stream::synchronize)?;
    for (number, (lane, calls)) in lanes.iter().zip([7, 2, 7]).enumerate() {
        let one_by_one = Lane::new(rank, number)?;
        for _ in 0..calls {
            one_by_one.call(&collectives, &first)?;
            first.synchronize()?;
        }
        assert!(lane.results()? == one_by_one.results()?, "the buffers of operation {number}");
    }
    rank.barrier()
}

#[test]
fn all_reduces_with_rmsnorm_are_ordered_around_captures_and_replays_on_any_stream() {
    for (seed, concurrent) in (0..6).flat_map(|seed| [(seed, 1), (seed, 2)]) {
        let simulation = Simulation::new(2).multiprocessors(3).seed(seed);
        Gpus::from(simulation)
            .run("all_reduces_with_rmsnorm_are_ordered", |rank| is_ordered(rank, concurrent));
    }
}

/// Launches a product of A and B to C.
type Launch =
    Box<dyn Fn(&SymmetricBuffer<bf16>, &SymmetricBuffer<bf16>, &Window<bf16>) -> Result<()>>;

/// The shape of the products.
const SHAPE: [usize; 3] = [512, 16, 16];

/// Returns a product of each operation and plan for two ranks: its name, the number of elements of
/// C, and the number of terms of each.
fn products(rank: &Rank, stream: &Stream) -> Result<Vec<(String, [usize; 2], Launch)>> {
    let (comm, [m, n, k], mut all) = (rank.communicator()?, SHAPE, Vec::<(_, _, Launch)>::new());
    for plan in [GemmAllReducePlan::Strips, GemmAllReducePlan::Unfused, GemmAllReducePlan::Wide] {
        let product = GemmAllReduce::new(comm, stream, m, n)?;
        product.set_plan(Some(plan))?;
        let how = format!("GemmAllReduce {}", product.explain(SHAPE)?);
        let launch = move |a: &_, b: &_, c: &_| product.launch(a, b, c, SHAPE);
        all.push((how, [m * n, 2 * k], Box::new(launch)));
    }
    for plan in [GemmReduceScatterPlan::Unfused, GemmReduceScatterPlan::Wide] {
        let product = GemmReduceScatter::new(comm, stream, m, n)?;
        product.set_plan(Some(plan))?;
        let how = format!("GemmReduceScatter {}", product.explain(SHAPE)?);
        let launch = move |a: &_, b: &_, c: &_| product.launch(a, b, c, SHAPE);
        all.push((how, [m / 2 * n, 2 * k], Box::new(launch)));
    }
    for plan in [AllGatherGemmPlan::Unfused, AllGatherGemmPlan::Fused] {
        let product = AllGatherGemm::new(comm, stream, m, k)?;
        product.set_plan(Some(plan))?;
        let how = format!("AllGatherGemm {}", product.explain(SHAPE)?);
        let launch = move |a: &_, b: &_, c: &_| product.launch(a, b, c, SHAPE);
        all.push((how, [m * n, k], Box::new(launch)));
    }
    assert!(all.iter().all(|(how, ..)| how.ends_with("as it was set")));
    Ok(all)
}

/// Launches products on their stream, captures one, and launches others after each of two replays
/// on another stream.
fn products_are_ordered(rank: &Rank) -> Result<()> {
    let (comm, [m, n, k]) = (rank.communicator()?, SHAPE);
    let (own, other) = (rank.stream()?, rank.stream()?);
    let b = comm.mem_alloc::<bf16>(n * k)?;
    own.fill(&b, bf16::ONE)?;
    for (how, [len, terms], launch) in products(rank, &own)? {
        let set = |value: u8| {
            let (a, c) = (comm.mem_alloc::<bf16>(m * k)?, comm.window::<bf16>(m * n)?);
            own.fill(&a, bf16::from(value))?;
            Ok::<_, Error>((a, c))
        };
        let sets = [set(1)?, set(2)?, set(3)?];
        own.synchronize()?;
        rank.barrier()?;
        let launch = |at: usize| launch(&sets[at].0, &b, &sets[at].1);
        (0..3).try_for_each(|_| launch(0))?;
        let graph = own.capture(|| launch(1))?;
        (0..3).try_for_each(|_| launch(2))?;
        graph.launch(&other)?;
        launch(0)?;
        graph.launch(&other)?;
        launch(2)?;
        [&own, &other].into_iter().try_for_each(Stream::synchronize)?;
        for (value, (_, c)) in (1..).zip(&sets) {
            let mut got = vec![bf16::ZERO; m * n];
            c.copy_to_host(&mut got)?;
            let right = bf16::from_f32((value * terms) as f32);
            assert!(got[..len].iter().all(|got| *got == right), "{how}: {}, not {right}", got[0]);
        }
    }
    rank.barrier()
}

#[test]
fn products_are_ordered_around_captures_and_replays_on_another_stream() {
    for seed in 0..3 {
        let simulation = Simulation::new(2).multiprocessors(2).seed(seed);
        Gpus::from(simulation).run("products_are_ordered_around_captures", products_are_ordered);
    }
}
