//! The generator of programs: the steps of all ranks, and the content that buffers then have.

use std::collections::BTreeMap;

use fastrand::Rng;

/// Streams of a program.
pub const STREAMS: usize = 4;
/// Objects with a workspace: `Collectives`.
pub const OBJECTS: usize = 3;
/// Buffers of a program.
pub const BUFFERS: usize = 6;

/// Larger values are not reduced again: f32 holds the results of three more all-reduces of four
/// ranks exactly.
const LARGE: f32 = 1e4;

/// A step of all ranks.
#[derive(Clone, Debug)]
pub enum Step {
    /// Enqueues work to a stream.
    Do(Work, usize),
    /// Makes the second stream wait for the first.
    Follow(usize, usize),
    Synchronize(usize),
    /// Captures the work from a stream; the graph replaces the one with this number.
    Capture {
        graph: usize,
        work: Vec<Work>,
        stream: usize,
    },
    Replay {
        graph: usize,
        stream: usize,
    },
    DropGraph(usize),
    /// Drops a buffer, and allocates another one, of zeros.
    Renew(usize),
    /// Drops an object with a workspace, and makes another one in its place.
    RenewObject(usize),
    /// Enqueues an all-reduce by NCCL in a group, and then refused work on the same stream.
    Group {
        buffer: usize,
        refused: Work,
        stream: usize,
    },
    /// Enqueues two all-reduces, each by an object, of a buffer, to a stream; on odd ranks in the
    /// other order.
    Opposite([(usize, usize, usize); 2]),
}

/// Work on a stream; buffers are numbered.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// An all-reduce in place, by an object.
    AllReduce {
        object: usize,
        buffer: usize,
    },
    /// An all-reduce of a buffer in place, by NCCL.
    Nccl(usize),
    Copy {
        from: usize,
        to: usize,
    },
    Fill {
        buffer: usize,
        value: f32,
    },
}

/// A combination of steps that programs must cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feature {
    /// An operation of an object on a third stream, after one on a first and a capture on a second.
    AfterCapture,
    /// An operation of an object after the replay of its graph on another stream.
    AfterReplay,
    /// A replay after a buffer of the graph was dropped.
    DroppedBeforeReplay,
    Grouped,
    Opposite,
}

pub const FEATURES: [Feature; 5] = [
    Feature::AfterCapture,
    Feature::AfterReplay,
    Feature::DroppedBeforeReplay,
    Feature::Grouped,
    Feature::Opposite,
];

/// A program, and the results that it must have.
#[derive(Debug)]
pub struct Program {
    /// The elements of a buffer.
    pub count: usize,
    pub steps: Vec<Step>,
    /// The content that the buffers of each rank have at the end.
    pub expected: Vec<[Value; BUFFERS]>,
    pub features: Vec<Feature>,
}

/// A buffer's content, as factor and term: element `i` is `factor * (1 + i % 3) + term`.
pub type Value = [f32; 2];

/// Returns the content that a buffer has at the beginning.
pub fn initial(rank: usize, buffer: usize) -> Value {
    [(1 + rank + buffer) as f32, 0.0]
}

/// The number of an allocation. A buffer that was dropped and the one in its place have different
/// numbers.
type Memory = usize;

/// A captured graph.
struct Graph {
    work: Vec<(Work, Memory, Memory)>,
    objects: Vec<usize>,
    stream: usize,
}

/// A program in the making, and the state of the memory after its steps one after the other.
struct Generator {
    random: Rng,
    ranks: usize,
    steps: Vec<Step>,
    features: Vec<Feature>,
    /// The content of each allocation, for each rank.
    memory: Vec<Vec<Value>>,
    /// The memory of each buffer.
    buffers: [Memory; BUFFERS],
    /// The stream that has last used an allocation: the program orders its accesses.
    last: BTreeMap<Memory, usize>,
    graphs: [Option<Graph>; 2],
    /// The stream of an object's last operation, and of the last capture and replay since.
    eager: [Option<usize>; OBJECTS],
    captured: [Option<usize>; OBJECTS],
    replayed: [Option<usize>; OBJECTS],
}

impl Program {
    pub fn generate(seed: u64, ranks: usize) -> Self {
        let mut random = Rng::with_seed(seed);
        let count = [1, 7, 300, 3000][random.usize(..4)];
        let memory = (0..BUFFERS).map(|b| (0..ranks).map(|r| initial(r, b)).collect()).collect();
        let mut generator = Generator {
            random,
            ranks,
            steps: Vec::new(),
            features: Vec::new(),
            memory,
            buffers: std::array::from_fn(|buffer| buffer),
            last: BTreeMap::new(),
            graphs: [None, None],
            eager: [None; OBJECTS],
            captured: [None; OBJECTS],
            replayed: [None; OBJECTS],
        };
        for _ in 0..generator.random.usize(6..25) {
            generator.step();
        }
        let Generator { steps, mut features, memory, buffers, .. } = generator;
        let content = |rank: usize| buffers.map(|at| memory[at][rank]);
        features.sort();
        features.dedup();
        Self { count, steps, expected: (0..ranks).map(content).collect(), features }
    }
}

impl Generator {
    fn step(&mut self) {
        let stream = self.random.usize(..STREAMS);
        match self.random.u32(..20) {
            0..=8 => {
                let work = self.work();
                self.enqueue(work, stream);
            }
            9 => {
                self.steps.push(Step::Synchronize(stream));
            }
            10..=12 => self.capture(stream),
            13..=15 => self.replay(stream),
            16 => self.renew(),
            17 => self.group(stream),
            // NCCL does the operations of three ranks, which must call them in one order.
            18 if self.ranks != 3 => self.opposite(),
            _ if self.random.bool() => {
                let object = self.random.usize(..OBJECTS);
                self.steps.push(Step::RenewObject(object));
                self.eager[object] = None;
                self.captured[object] = None;
                self.replayed[object] = None;
            }
            _ => {
                let graph = self.random.usize(..2);
                self.graphs[graph] = None;
                self.steps.push(Step::DropGraph(graph));
            }
        }
    }

    /// Returns random work whose result is small enough to be exact.
    fn work(&mut self) -> Work {
        let buffer = self.random.usize(..BUFFERS);
        let object = self.random.usize(..OBJECTS);
        let is_large = self.is_large(self.buffers[buffer]);
        match self.random.u32(..8) {
            _ if is_large => Work::Fill { buffer, value: self.random.u8(..) as f32 },
            0..=4 => Work::AllReduce { object, buffer },
            5 => Work::Nccl(buffer),
            6 => {
                let to = (buffer + self.random.usize(1..BUFFERS)) % BUFFERS;
                Work::Copy { from: buffer, to }
            }
            _ => Work::Fill { buffer, value: self.random.u8(..) as f32 },
        }
    }

    fn is_large(&self, memory: Memory) -> bool {
        self.memory[memory].iter().any(|[factor, term]| factor + term > LARGE)
    }

    /// Returns the memory that work uses.
    fn used(&self, work: Work) -> [Memory; 2] {
        let [from, to] = match work {
            Work::AllReduce { buffer, .. } | Work::Nccl(buffer) | Work::Fill { buffer, .. } => {
                [buffer; 2]
            }
            Work::Copy { from, to } => [from, to],
        };
        [self.buffers[from], self.buffers[to]]
    }

    /// Makes `stream` wait for the last uses of the memory.
    fn order(&mut self, memory: &[Memory], stream: usize) {
        for memory in memory {
            if let Some(last) = self.last.insert(*memory, stream)
                && last != stream
            {
                self.steps.push(Step::Follow(last, stream));
            }
        }
    }

    fn perform(&mut self, work: Work, [from, to]: [Memory; 2]) {
        match work {
            Work::AllReduce { .. } | Work::Nccl(_) => {
                let sum = |i: usize| self.memory[from].iter().map(|value| value[i]).sum::<f32>();
                let sum = [sum(0), sum(1)];
                self.memory[to] = vec![sum; self.ranks];
            }
            Work::Copy { .. } => self.memory[to] = self.memory[from].clone(),
            Work::Fill { value, .. } => self.memory[to] = vec![[0.0, value]; self.ranks],
        }
    }

    fn enqueue(&mut self, work: Work, stream: usize) {
        let memory = self.used(work);
        self.order(&memory, stream);
        self.note_eager(work, stream);
        self.steps.push(Step::Do(work, stream));
        self.perform(work, memory);
    }

    fn note_eager(&mut self, work: Work, stream: usize) {
        let Work::AllReduce { object, .. } = work else { return };
        if let (Some(first), Some(second)) = (self.eager[object], self.captured[object].take())
            && first != stream
            && second != stream
            && first != second
        {
            self.features.push(Feature::AfterCapture);
        }
        if self.replayed[object].take().is_some_and(|replayed| replayed != stream) {
            self.features.push(Feature::AfterReplay);
        }
        self.eager[object] = Some(stream);
    }

    fn capture(&mut self, stream: usize) {
        let graph = self.random.usize(..2);
        let work: Vec<_> = (0..self.random.usize(1..4)).map(|_| self.work()).collect();
        let objects: Vec<_> = work
            .iter()
            .filter_map(|work| match work {
                Work::AllReduce { object, .. } => Some(*object),
                _ => None,
            })
            .collect();
        objects.iter().for_each(|object| self.captured[*object] = Some(stream));
        let used = work.iter().map(|work| {
            let [from, to] = self.used(*work);
            (*work, from, to)
        });
        self.graphs[graph] = Some(Graph { work: used.collect(), objects, stream });
        self.steps.push(Step::Capture { graph, work, stream });
    }

    fn replay(&mut self, stream: usize) {
        let graph = self.random.usize(..2);
        let Some(Graph { work, objects, stream: captured }) = self.graphs[graph].take() else {
            return;
        };
        let all = work.iter().flat_map(|(_, from, to)| [*from, *to]);
        let all: Vec<_> = all.collect();
        if all.iter().any(|memory| self.is_large(*memory)) {
            return;
        }
        if all.iter().any(|memory| !self.buffers.contains(memory)) {
            self.features.push(Feature::DroppedBeforeReplay);
        }
        self.order(&all, stream);
        for (work, from, to) in &work {
            self.perform(*work, [*from, *to]);
        }
        objects.iter().for_each(|object| self.replayed[*object] = Some(stream));
        self.steps.push(Step::Replay { graph, stream });
        self.graphs[graph] = Some(Graph { work, objects: objects.clone(), stream: captured });
        // In half of the cases, another operation of the same object follows at once.
        if let Some(object) = objects.first()
            && self.random.bool()
        {
            let unused = (0..BUFFERS).find(|buffer| !all.contains(&self.buffers[*buffer]));
            let other = (stream + self.random.usize(1..STREAMS)) % STREAMS;
            if let Some(buffer) = unused {
                self.enqueue(Work::AllReduce { object: *object, buffer }, other);
            }
        }
    }

    fn renew(&mut self) {
        // If possible, this is a buffer that a graph uses, and that graph is then launched.
        let graph = self.random.usize(..2);
        let used = self.graphs[graph].as_ref().map(|graph| graph.work[0].2);
        let used = used.and_then(|memory| self.buffers.iter().position(|own| *own == memory));
        let buffer = used.unwrap_or_else(|| self.random.usize(..BUFFERS));
        let value = self.random.u8(..) as f32;
        self.buffers[buffer] = self.memory.len();
        self.memory.push(vec![[0.0; 2]; self.ranks]);
        self.steps.push(Step::Renew(buffer));
        let stream = self.random.usize(..STREAMS);
        self.enqueue(Work::Fill { buffer, value }, stream);
        if used.is_some() {
            self.replay_graph(graph, stream);
        }
    }

    fn replay_graph(&mut self, graph: usize, stream: usize) {
        // `replay` chooses a graph at random, and does nothing where none is. So the others are
        // hidden, and it is called until it has chosen this one.
        let others: Vec<_> = (0..2).filter(|other| *other != graph).collect();
        let kept: Vec<_> = others.iter().map(|other| self.graphs[*other].take()).collect();
        if self.graphs[graph].is_some() {
            for _ in 0..8 {
                let before = self.steps.len();
                self.replay(stream);
                if self.steps.len() != before {
                    break;
                }
            }
        }
        others.into_iter().zip(kept).for_each(|(other, graph)| self.graphs[other] = graph);
    }

    fn group(&mut self, stream: usize) {
        let buffer = self.random.usize(..BUFFERS);
        let memory = self.buffers[buffer];
        if self.is_large(memory) {
            return;
        }
        self.order(&[memory], stream);
        let refused = match self.random.u32(..3) {
            0 => Work::Fill { buffer, value: 9.0 },
            1 => Work::Copy { from: buffer, to: (buffer + 1) % BUFFERS },
            _ if self.ranks == 3 => Work::Fill { buffer, value: 9.0 },
            _ => Work::AllReduce { object: 0, buffer },
        };
        self.steps.push(Step::Group { buffer, refused, stream });
        self.perform(Work::Nccl(buffer), [memory; 2]);
        self.features.push(Feature::Grouped);
    }

    fn opposite(&mut self) {
        let first = self.random.usize(..STREAMS);
        let second = (first + self.random.usize(1..STREAMS)) % STREAMS;
        let [a, b] = [self.random.usize(..3), self.random.usize(3..BUFFERS)];
        let memory = [self.buffers[a], self.buffers[b]];
        if memory.into_iter().any(|memory| self.is_large(memory)) {
            return;
        }
        // Nothing else is in flight.
        (0..STREAMS).for_each(|stream| self.steps.push(Step::Synchronize(stream)));
        let object = self.random.usize(..OBJECTS);
        let other = (object + self.random.usize(1..OBJECTS)) % OBJECTS;
        let pair = [(object, a, first), (other, b, second)];
        self.steps.push(Step::Opposite(pair));
        for (object, buffer, stream) in pair {
            let work = Work::AllReduce { object, buffer };
            self.last.insert(self.buffers[buffer], stream);
            self.note_eager(work, stream);
            self.perform(work, [self.buffers[buffer]; 2]);
        }
        self.features.push(Feature::Opposite);
    }
}
