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

/// What an error says about a capture with a first half only.
const NOT_RECEIVED: &str = "what was sent in this capture is not received in it";

/// Checks that a call fails with an error that contains `why`.
#[track_caller]
fn contains<T>(result: Result<T>, why: &str) {
    let error = result.err().expect("the call is refused").to_string();
    assert!(error.contains(why), "{error}");
}

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
            contains(
                stream.capture(|| {
                    sent = Some(experts.start_combine(rows, stream)?);
                    Ok::<_, devcomm::Error>(())
                }),
                NOT_RECEIVED,
            );
            sent.unwrap()
        };
        refused(sent.receive(output, None), "has ended");
        let again = stream.capture(|| sent.receive(output, None));
        refused(again.map(drop), "has ended");
        drop(sent);
        // The tokens of a dispatch that was captured and not received are none of the last one.
        let half = || experts.start_dispatch(memory.tokens(0), stream).map(drop);
        contains(stream.capture(half), NOT_RECEIVED);
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

impl Memory {
    /// Enqueues a dispatch and a group.
    fn group(&self, count: usize) -> Result<()> {
        self.experts.dispatch(self.tokens(count), &self.stream)?;
        self.experts.group(&self.rows, &self.stream)
    }

    fn combine(&self) -> Result<()> {
        self.experts.combine(&self.rows, &self.output, None, &self.stream)
    }

    /// Checks that the last combine was one of the first `count` tokens, and forgets its results.
    fn require_results(&self, rank: &Rank, batch: &Batch, count: usize) -> Result<()> {
        let expected = batch.combined(rank.rank(), None, |_| 1.0);
        self.check_output(&expected[..count * batch.hidden])?;
        self.output.fill_bytes(0xff)
    }
}

/// Runs `f` with each form, a batch of 5 tokens in both ranks, and on several schedules.
fn with_memory(name: &str, f: fn(&Rank, &Memory, &Batch) -> Result<()>) {
    for seed in 1..4 {
        Gpus::from(Simulation::new(2).multiprocessors(3).seed(seed)).run(name, |rank| {
            let batch = Batch::new(64, 8, 2, &[5, 5], seed).routed(Routing::Random, seed);
            for memory in Memory::of_each(rank, &batch, 5)? {
                memory.write(rank, &batch)?;
                f(rank, &memory, &batch)?;
                memory.step(5)?;
                memory.require_results(rank, &batch, 5)?;
                memory.experts.check()?;
            }
            Ok(())
        });
    }
}

#[test]
fn an_operation_continues_the_step_of_the_graph_that_was_launched_last() {
    let name = "an_operation_continues_the_step_of_the_graph_that_was_launched_last";
    with_memory(name, |rank, memory, batch| {
        let Memory { experts, stream, rows, output, .. } = memory;
        for [in_graph, before] in [[5, 2], [2, 5], [0, 5], [5, 0]] {
            let graph = stream.capture(|| memory.group(in_graph))?;
            memory.group(before)?;
            (0..3).try_for_each(|_| graph.launch(stream))?;
            memory.combine()?;
            memory.require_results(rank, batch, in_graph)?;
        }
        experts.check()?;
        // The rows of the last group have room for more than this.
        let few = rows.slice(..2 * batch.hidden)?;
        if experts.rows::<bf16>().is_err() {
            let graph = stream.capture(|| memory.group(5))?;
            experts.dispatch(memory.tokens(5), stream)?;
            experts.group(&few, stream)?;
            graph.launch(stream)?;
            contains(experts.combine(&few, output, None, stream), "results has 128 elements");
            memory.combine()?;
            memory.require_results(rank, batch, 5)?;
            contains(experts.check(), "room for 2");
            let graph = stream.capture(|| {
                experts.dispatch(memory.tokens(5), stream)?;
                experts.group(&few, stream)
            })?;
            memory.group(5)?;
            graph.launch(stream)?;
            contains(experts.check(), "room for 2");
        }
        Ok(())
    });
}

#[test]
fn a_graph_of_a_part_of_a_step_is_launched_only_after_the_rest() {
    let name = "a_graph_of_a_part_of_a_step_is_launched_only_after_the_rest";
    with_memory(name, |rank, memory, batch| {
        let Memory { experts, stream, rows, .. } = memory;
        let dispatch = |count| experts.dispatch(memory.tokens(count), stream);
        let dispatches = stream.capture(|| dispatch(2))?;
        contains(experts.group(rows, stream), "no tokens have been received");
        drop(stream.capture(|| memory.group(2))?);
        contains(memory.combine(), "in no order");
        memory.group(2)?;
        let combines = stream.capture(|| memory.combine())?;
        for _ in 0..2 {
            combines.launch(stream)?;
            memory.require_results(rank, batch, 2)?;
        }
        dispatches.launch(stream)?;
        let groups = stream.capture(|| experts.group(rows, stream))?;
        let both = stream.capture(|| {
            experts.group(rows, stream)?;
            memory.combine()
        })?;
        contains(combines.launch(stream), "the last step is a dispatch of 2 tokens");
        experts.group(rows, stream)?;
        combines.launch(stream)?;
        memory.require_results(rank, batch, 2)?;
        memory.group(5)?;
        for graph in [&groups, &combines, &both] {
            contains(graph.launch(stream), "the last step is a dispatch of 5 tokens");
        }
        memory.combine()?;
        memory.require_results(rank, batch, 5)?;
        for _ in 0..2 {
            dispatches.launch(stream)?;
            both.launch(stream)?;
            memory.require_results(rank, batch, 2)?;
            groups.launch(stream)?;
            combines.launch(stream)?;
            memory.require_results(rank, batch, 2)?;
        }
        if experts.rows::<bf16>().is_err() {
            dispatch(2)?;
            experts.group(&rows.slice(..rows.len() - batch.hidden)?, stream)?;
            contains(
                combines.launch(stream),
                "the last step is a dispatch of 2 tokens and a group",
            );
        }
        Ok(())
    });
}

#[test]
fn what_is_sent_in_a_graph_is_received_in_it_and_nothing_is_on_its_way_at_its_launch() {
    let name = "what_is_sent_in_a_graph_is_received_in_it_and_nothing_is_on_its_way_at_its_launch";
    with_memory(name, |rank, memory, batch| {
        let Memory { experts, stream, rows, output, .. } = memory;
        let graph = stream.capture(|| {
            // The next operation receives what was sent first.
            drop(experts.start_dispatch(memory.tokens(2), stream)?);
            experts.group(rows, stream)?;
            experts.start_combine(rows, stream)?.receive(output, None)
        })?;
        memory.group(5)?;
        let half = || experts.start_combine(rows, stream).map(drop);
        contains(stream.capture(half), NOT_RECEIVED);
        let half = || experts.start_dispatch(memory.tokens(2), stream).map(drop);
        contains(stream.capture(half), NOT_RECEIVED);
        memory.combine()?;
        memory.require_results(rank, batch, 5)?;
        let returning = experts.start_combine(rows, stream)?;
        contains(graph.launch(stream), "on their way");
        returning.receive(output, None)?;
        memory.require_results(rank, batch, 5)?;
        let sent = experts.start_dispatch(memory.tokens(5), stream)?;
        contains(graph.launch(stream), "on their way");
        sent.receive()?;
        for _ in 0..2 {
            graph.launch(stream)?;
            memory.require_results(rank, batch, 2)?;
        }
        Ok(())
    });
}

#[test]
fn steps_in_a_fork_of_a_capture_are_its_graphs_and_those_on_other_streams_are_not() {
    let name = "steps_in_a_fork_of_a_capture_are_its_graphs_and_those_on_other_streams_are_not";
    with_memory(name, |rank, memory, batch| {
        let Memory { experts, stream, rows, output, .. } = memory;
        let (fork, free) = (rank.stream()?, rank.stream()?);
        let (begun, ended) = (rank.context().event()?, rank.context().event()?);
        stream.synchronize()?;
        let graph = stream.capture(|| {
            stream.record(&begun)?;
            fork.wait_event(&begun)?;
            experts.dispatch(memory.tokens(2), &fork)?;
            experts.dispatch(memory.tokens(5), &free)?;
            experts.group(rows, &fork)?;
            fork.record(&ended)?;
            experts.group(rows, &free)?;
            stream.wait_event(&ended)
        })?;
        experts.combine(rows, output, None, &free)?;
        memory.require_results(rank, batch, 5)?;
        graph.launch(&free)?;
        memory.combine()?;
        memory.require_results(rank, batch, 2)
    });
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
