//! Tests that generated programs of operations, copies, captures, replays, drops and groups on
//! several streams compute the same as their steps one after the other.

mod program;

use std::collections::BTreeMap;
use std::sync::Mutex;

use devcomm::{
    Buffer, Collectives, CollectivesOptions, Communicator, DeviceBuffer, Error, Graph, Rank,
    ReduceOp, Simulation, StateError, Stream, World, group,
};
use devcomm_testing::machines::Gpus;

use self::program::{BUFFERS, FEATURES, OBJECTS, Program, STREAMS, Step, Value, Work, initial};

/// How many programs run; default 300.
const PROGRAMS: &str = "DEVCOMM_PROGRAMS";

/// The objects with which a rank runs programs.
struct Run<'a> {
    rank: &'a Rank,
    streams: Vec<Stream>,
    objects: Vec<Collectives>,
    buffers: Vec<DeviceBuffer<f32>>,
    graphs: [Option<Graph>; 2],
    count: usize,
}

/// Makes an object with a small workspace, which takes little time to zero.
fn object(comm: &Communicator) -> Result<Collectives, Error> {
    CollectivesOptions::new().lamport_bytes(16 << 10).build(comm)
}

fn values(count: usize, [factor, term]: Value) -> Vec<f32> {
    (0..count).map(|i| factor * (1 + i % 3) as f32 + term).collect()
}

impl<'a> Run<'a> {
    fn new(rank: &'a Rank) -> Result<Self, Error> {
        let comm = rank.communicator()?;
        Ok(Self {
            rank,
            streams: (0..STREAMS).map(|_| rank.stream()).collect::<Result<_, _>>()?,
            objects: (0..OBJECTS).map(|_| object(comm)).collect::<Result<_, _>>()?,
            buffers: Vec::new(),
            graphs: [None, None],
            count: 0,
        })
    }

    /// Runs a program, and fails if it does not compute `expected`. Streams and objects are reused
    /// from the previous program.
    fn run(&mut self, seed: u64, program: &Program) -> Result<(), Error> {
        let (rank, count) = (self.rank, program.count);
        let buffer = |buffer| {
            let memory = rank.context().alloc(count)?;
            memory.device_slice().copy_from_host(&values(count, initial(rank.rank(), buffer)))?;
            Ok(memory)
        };
        (self.graphs, self.count) = ([None, None], count);
        self.buffers = (0..BUFFERS).map(buffer).collect::<Result<_, Error>>()?;
        rank.barrier()?;
        program.steps.iter().try_for_each(|step| self.step(step))?;
        let wrong = self.wrong(&program.expected[rank.rank()])?;
        assert!(wrong.is_empty(), "program {seed}, rank {}: {wrong:?}\n{program:#?}", rank.rank());
        Ok(())
    }

    fn enqueue(&self, work: Work, stream: usize) -> Result<(), Error> {
        let (stream, buffers) = (&self.streams[stream], &self.buffers);
        match work {
            Work::AllReduce { object, buffer } => {
                let memory = &buffers[buffer];
                self.objects[object].all_reduce(memory, memory, ReduceOp::Sum, stream)
            }
            Work::Nccl(buffer) => {
                let memory = &buffers[buffer];
                self.rank.communicator()?.all_reduce(memory, memory, ReduceOp::Sum, stream)
            }
            Work::Copy { from, to } => stream.copy(&buffers[from], &buffers[to]),
            Work::Fill { buffer, value } => stream.fill(&buffers[buffer], value),
        }
    }

    fn step(&mut self, step: &Step) -> Result<(), Error> {
        match step {
            Step::Do(work, stream) => self.enqueue(*work, *stream),
            Step::Follow(first, second) => {
                let event = self.rank.context().event_without_timing()?;
                self.streams[*first].record(&event)?;
                self.streams[*second].wait_event(&event)
            }
            Step::Synchronize(stream) => self.streams[*stream].synchronize(),
            Step::Capture { graph, work, stream } => {
                let capture = || work.iter().try_for_each(|work| self.enqueue(*work, *stream));
                let captured = self.streams[*stream].capture(capture)?;
                self.graphs[*graph] = Some(captured);
                Ok(())
            }
            Step::Replay { graph, stream } => {
                let graph = self.graphs[*graph].as_ref();
                graph.map_or(Ok(()), |graph| graph.launch(&self.streams[*stream]))
            }
            Step::DropGraph(graph) => {
                self.graphs[*graph] = None;
                Ok(())
            }
            Step::Renew(buffer) => {
                // The old buffer is dropped first, so that the new one can be in its place.
                self.buffers.remove(*buffer);
                self.buffers.insert(*buffer, self.rank.context().alloc(self.count)?);
                Ok(())
            }
            Step::RenewObject(object) => {
                let old = self.objects.remove(*object);
                drop(old);
                self.objects.insert(*object, self::object(self.rank.communicator()?)?);
                Ok(())
            }
            Step::Group { buffer, refused, stream } => group(|_| {
                self.enqueue(Work::Nccl(*buffer), *stream)?;
                let refusal = self.enqueue(*refused, *stream);
                let is_refused =
                    matches!(refusal, Err(Error::State(StateError::BeforeDeferred { .. })));
                assert!(is_refused, "{refused:?} in a group: {refusal:?}");
                Ok(())
            }),
            Step::Opposite([first, second]) => {
                let order = match self.rank.rank() % 2 {
                    0 => [first, second],
                    _ => [second, first],
                };
                order.into_iter().try_for_each(|(object, buffer, stream)| {
                    self.enqueue(Work::AllReduce { object: *object, buffer: *buffer }, *stream)
                })
            }
        }
    }

    /// Returns descriptions of the buffers whose content is wrong.
    fn wrong(&self, expected: &[Value; BUFFERS]) -> Result<Vec<String>, Error> {
        let mut wrong = Vec::new();
        self.streams.iter().try_for_each(Stream::synchronize)?;
        for (number, (buffer, value)) in self.buffers.iter().zip(expected).enumerate() {
            let mut got = vec![0.0; self.count];
            buffer.device_slice().copy_to_host(&mut got)?;
            let expected = values(self.count, *value);
            let differ = got.iter().zip(&expected).filter(|(got, expected)| got != expected);
            let (first, count) = (got[0], differ.count());
            if count > 0 {
                wrong.push(format!(
                    "buffer {number}: {count} elements differ; the first is {first}, not {}",
                    expected[0]
                ));
            }
        }
        Ok(wrong)
    }
}

fn programs() -> u64 {
    let asked = std::env::var(PROGRAMS).ok();
    asked.map_or(300, |asked| asked.parse().expect("DEVCOMM_PROGRAMS is a number"))
}

#[test]
fn generated_programs_compute_what_they_do_one_step_after_the_other() {
    let only = std::env::var("DEVCOMM_PROGRAM").ok().map(|seed| seed.parse::<u64>().unwrap());
    let seeds = only.map_or(0..programs(), |seed| seed..seed + 1);
    let mut features = BTreeMap::new();
    let mut failed = Vec::new();
    let count = seeds.end - seeds.start;
    for seed in seeds {
        let ranks = [2, 2, 4, 3][seed as usize % 4];
        let program = Program::generate(seed, ranks);
        for feature in &program.features {
            *features.entry(*feature).or_insert(0) += 1;
        }
        let multiprocessors = [2, 3, 8][seed as usize / 4 % 3];
        let simulation = Simulation::new(ranks).seed(seed).multiprocessors(multiprocessors);
        let world = World::builder().checked(false).simulate(simulation).from_env().unwrap();
        let ran = world.run(|rank| Run::new(rank)?.run(seed, &program));
        if let Err(error) = ran {
            let text = error.to_string();
            let first: Vec<_> = text.lines().take(if count == 1 { 200 } else { 3 }).collect();
            failed.push(format!("program {seed}, {:?}: {}", program.features, first.join("\n  ")));
        }
    }
    println!("{count} programs: {features:?}");
    assert!(failed.is_empty(), "{} of {count} failed:\n{}", failed.len(), failed.join("\n"));
    // If there are many programs, at least a twentieth of them has each feature.
    if count >= 1000 {
        for feature in FEATURES {
            let has = features.get(&feature).copied().unwrap_or(0);
            assert!(20 * has >= count, "only {has} of {count} programs have {feature:?}");
        }
    }
}

/// All programs run in one world, and reuse its streams, objects and communicators.
#[test]
fn generated_programs_compute_the_same_on_gpus() {
    let ran = Mutex::new(BTreeMap::new());
    let count = programs();
    Gpus::new(2).unchecked().run("generated_programs_compute_the_same_on_gpus", |rank| {
        let mut run = Run::new(rank)?;
        for seed in 0..count {
            let program = Program::generate(seed, 2);
            run.run(seed, &program)?;
            if rank.is_root() {
                for feature in program.features {
                    *ran.lock().unwrap().entry(feature).or_insert(0) += 1;
                }
            }
        }
        Ok(())
    });
    println!("{count} programs: {:?}", ran.lock().unwrap());
}
