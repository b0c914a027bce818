//! Tests that steps are ordered around captures and replays, on any stream.

use devcomm::{
    Buffer, ExpertParallel, ExpertParallelOptions, Rank, Result, Simulation, Stream,
    SymmetricBuffer, Tokens,
};
use devcomm_testing::experts::{Batch, Routing};
use devcomm_testing::machines::Gpus;
use half::bf16;

use crate::{FORMS, Memory, few, options};

/// The most tokens of a rank.
const MOST: usize = 3;

/// The buffers of a step, and its batch.
struct Lane {
    batch: Batch,
    /// The number of this rank's tokens.
    count: usize,
    input: SymmetricBuffer<bf16>,
    ids: SymmetricBuffer<i32>,
    weights: SymmetricBuffer<f32>,
    rows: SymmetricBuffer<bf16>,
    output: SymmetricBuffer<bf16>,
}

impl Lane {
    fn new(rank: &Rank, batch: Batch, most_rows: usize) -> Result<Self> {
        let (comm, me) = (rank.communicator()?, rank.rank());
        let lane = Self {
            count: batch.tokens[me],
            input: comm.mem_alloc(MOST * batch.hidden)?,
            ids: comm.mem_alloc(MOST * batch.top_k)?,
            weights: comm.mem_alloc(MOST * batch.top_k)?,
            rows: comm.mem_alloc(most_rows * batch.hidden)?,
            output: comm.mem_alloc(MOST * batch.hidden)?,
            batch,
        };
        lane.input.copy_from_host(&lane.batch.inputs[me])?;
        lane.ids.copy_from_host(&lane.batch.ids[me])?;
        lane.weights.copy_from_host(&lane.batch.weights[me])?;
        Ok(lane)
    }

    /// Enqueues a step whose experts leave the rows as they are.
    fn step(&self, experts: &ExpertParallel, stream: &Stream) -> Result<()> {
        let Self { count, input, ids, weights, rows, output, .. } = self;
        experts.dispatch(Tokens { count: *count, input, ids, weights }, stream)?;
        experts.group(rows, stream)?;
        experts.combine(rows, output, None, stream)
    }

    /// Checks the results of the last step, and forgets them.
    fn check(&self, rank: &Rank) -> Result<()> {
        let mut got = vec![bf16::ZERO; self.count * self.batch.hidden];
        self.output.slice(..got.len())?.copy_to_host(&mut got)?;
        let expected = self.batch.combined(rank.rank(), None, |_| 1.0);
        assert_eq!(got.iter().zip(&expected).position(|(got, want)| got != want), None);
        self.output.fill_bytes(0xff)
    }
}

/// Enqueues steps on a first stream, captures one on a second, enqueues others on a third, and does
/// one after each of two replays, on another stream.
fn is_ordered(rank: &Rank, form: fn(ExpertParallelOptions) -> ExpertParallelOptions) -> Result<()> {
    let batch = |seed| Batch::new(136, 8, 2, &[3, 2], seed).routed(Routing::Random, seed);
    let options = form(few(rank, options(&batch(0), MOST)));
    let experts = options.build(rank.communicator()?)?;
    let [first, second, third] = [rank.stream()?, rank.stream()?, rank.stream()?];
    let lane = |seed| Lane::new(rank, batch(seed), experts.most_rows());
    let [a, b, c] = [lane(0)?, lane(1)?, lane(2)?];
    let synchronize = || [&first, &second, &third].into_iter().try_for_each(Stream::synchronize);
    (0..3).try_for_each(|_| a.step(&experts, &first))?;
    let graph = second.capture(|| b.step(&experts, &second))?;
    (0..3).try_for_each(|_| c.step(&experts, &third))?;
    synchronize()?;
    [&a, &c].into_iter().try_for_each(|lane| lane.check(rank))?;
    graph.launch(&second)?;
    a.step(&experts, &first)?;
    graph.launch(&third)?;
    c.step(&experts, &second)?;
    synchronize()?;
    [&a, &b, &c].into_iter().try_for_each(|lane| lane.check(rank))?;
    experts.check()?;
    rank.barrier()
}

/// Checks that both halves of an operation are refused unless they are in one capture or in none,
/// and that the object goes on.
fn halves_are_in_one_capture(rank: &Rank) -> Result<()> {
    let batch = Batch::new(136, 8, 2, &[3, 2], 1).routed(Routing::Random, 1);
    let (count, expected) = (batch.tokens[rank.rank()], batch.combined(rank.rank(), None, |_| 1.0));
    for memory in Memory::of_each(rank, &batch, MOST)? {
        memory.write(rank, &batch)?;
        let Memory { experts, stream, rows, output, .. } = &memory;
        let refused = |result: Result<()>, why: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("in one capture, or in none") && error.contains(why), "{error}");
        };
        // A first half outside of the capture in which the second one is called, or dropped.
        let sent = experts.start_dispatch(memory.tokens(count), stream)?;
        let captured = stream.capture(|| {
            refused(sent.receive(), "what was sent is in none");
            Ok::<_, devcomm::Error>(())
        });
        drop(captured?);
        let other = rank.stream()?;
        let elsewhere = other.capture(|| sent.receive()).map(drop).unwrap_err().to_string();
        assert!(elsewhere.contains("while a stream is captured"), "{elsewhere}");
        sent.receive()?;
        experts.group(rows, stream)?;
        drop(experts.start_dispatch(memory.tokens(count), stream)?);
        let grouped = stream.capture(|| experts.group(rows, stream));
        refused(grouped.map(drop), "what was sent is in none");
        experts.group(rows, stream)?;
        // A first half in a capture that has ended.
        let sent = {
            let mut sent = None;
            drop(stream.capture(|| {
                sent = Some(experts.start_combine(rows, stream)?);
                Ok::<_, devcomm::Error>(())
            })?);
            sent.unwrap()
        };
        refused(sent.receive(output, None), "has ended");
        let again = stream.capture(|| sent.receive(output, None));
        refused(again.map(drop), "has ended");
        drop(sent);
        // The tokens of a dispatch that was captured and not received are none of the last one.
        drop(stream.capture(|| experts.start_dispatch(memory.tokens(0), stream).map(drop))?);
        memory.output.fill_bytes(0xff)?;
        experts.combine(rows, output, None, stream)?;
        memory.check_output(&expected)?;
        // Nor are those of a capture that fails.
        memory.output.fill_bytes(0xff)?;
        let failed = stream.capture(|| {
            experts.dispatch(memory.tokens(0), stream)?;
            experts.group(rows, stream)?;
            Err(devcomm::Error::InvalidInput { what: "as it must".to_owned() })
        });
        assert!(failed.is_err());
        experts.combine(rows, output, None, stream)?;
        memory.check_output(&expected)?;
        let absent = stream.capture(|| experts.set_absent(&[], stream)).unwrap_err().to_string();
        assert!(absent.contains("ranks are declared absent"), "{absent}");
        memory.write(rank, &batch)?;
        memory.step(count)?;
        memory.check_output(&expected)?;
    }
    Ok(())
}

/// Checks that a capture that fails takes back what it has recorded of all objects, also if another
/// capture has become a graph.
fn failed_captures_are_taken_back(rank: &Rank) -> Result<()> {
    let batch = Batch::new(136, 8, 2, &[3, 2], 1).routed(Routing::Random, 1);
    let (count, expected) = (batch.tokens[rank.rank()], batch.combined(rank.rank(), None, |_| 1.0));
    let memories = Memory::of_each(rank, &batch, MOST)?;
    memories.iter().try_for_each(|memory| memory.write(rank, &batch))?;
    let stream = rank.stream()?;
    let group = |count| {
        memories.iter().try_for_each(|memory| {
            memory.experts.dispatch(memory.tokens(count), &stream)?;
            memory.experts.group(&memory.rows, &stream)
        })
    };
    stream.capture(|| group(count))?.launch(&stream)?;
    let failed = stream.capture(|| {
        group(0)?;
        Err(devcomm::Error::InvalidInput { what: "as it must".to_owned() })
    });
    assert!(failed.is_err());
    for Memory { experts, rows, output, .. } in &memories {
        experts.combine(rows, output, None, &stream)?;
    }
    stream.synchronize()?;
    memories.iter().try_for_each(|memory| memory.check_output(&expected))
}

#[test]
fn a_capture_that_fails_takes_back_the_steps_of_all_objects() {
    let name = "a_capture_that_fails_takes_back_the_steps_of_all_objects";
    Gpus::from(Simulation::new(2).multiprocessors(3)).run(name, failed_captures_are_taken_back);
}

#[test]
fn both_halves_of_an_operation_are_in_one_capture_or_in_none() {
    let name = "both_halves_of_an_operation_are_in_one_capture_or_in_none";
    Gpus::from(Simulation::new(2).multiprocessors(3)).run(name, halves_are_in_one_capture);
}

#[test]
fn steps_are_ordered_around_captures_and_replays_on_any_stream() {
    for (seed, form) in (0..4).flat_map(|seed| FORMS.map(|form| (seed, form))) {
        let simulation = Simulation::new(2).multiprocessors(3).seed(seed);
        let gpus = Gpus::from(simulation);
        gpus.run("steps_are_ordered_around_captures", |rank| is_ordered(rank, form));
    }
}
