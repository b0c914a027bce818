//! Tests of `devcomm::ExpertParallel`: every row of every rank is checked.

mod absent;
mod captured;
mod f8;
mod hybrid;
mod throughput;
mod wrong;

use devcomm::{
    Buffer, DeviceSlice, ExpertParallel, ExpertParallelOptions, Rank, Result, Simulation, Stream,
    SymmetricBuffer, Tokens,
};
use devcomm_testing::experts::{Batch, Layout, Routing};
use devcomm_testing::machines::{Gpus, on_gpus};
use half::bf16;

/// The memory of a rank's steps.
struct Memory {
    experts: ExpertParallel,
    stream: Stream,
    input: SymmetricBuffer<bf16>,
    ids: SymmetricBuffer<i32>,
    weights: SymmetricBuffer<f32>,
    rows: DeviceSlice<bf16>,
    output: SymmetricBuffer<bf16>,
    residual: SymmetricBuffer<bf16>,
}

/// The forms for ranks that load and store reach.
const FORMS: [fn(ExpertParallelOptions) -> ExpertParallelOptions; 2] =
    [|options| options, |options| options.throughput(usize::MAX)];

/// Returns the factor by which expert `expert` multiplies a row: a power of two.
fn factor(expert: usize) -> f32 {
    [1.0, -2.0, 0.5, 4.0, -0.25][expert % 5]
}

/// Returns the residual of a rank.
fn residual(rank: usize, len: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32(((i * 7 + rank * 3) % 64) as f32 / 16.0)).collect()
}

impl Memory {
    fn new(
        rank: &Rank,
        options: ExpertParallelOptions,
        batch: &Batch,
        most: usize,
    ) -> Result<Self> {
        let comm = rank.communicator()?;
        let (experts, stream) = (options.build(comm)?, rank.stream()?);
        let row = batch.hidden;
        let memory = Self {
            stream,
            input: comm.mem_alloc(most * row)?,
            ids: comm.mem_alloc(most * batch.top_k)?,
            weights: comm.mem_alloc(most * batch.top_k)?,
            rows: comm.mem_alloc(experts.most_rows() * row)?.device_slice(),
            output: comm.mem_alloc(most * row)?,
            residual: comm.mem_alloc(most * row)?,
            experts,
        };
        memory.residual.copy_from_host(&residual(rank.rank(), most * row))?;
        Ok(memory)
    }

    /// Prepares a batch whose ranks have at most `most` tokens.
    fn of(rank: &Rank, batch: &Batch, most: usize) -> Result<Self> {
        Self::new(rank, few(rank, options(batch, most)), batch, most)
    }

    /// Returns the memory of each form.
    fn of_each(rank: &Rank, batch: &Batch, most: usize) -> Result<[Self; 2]> {
        let memory = |form: usize| {
            Self::new(rank, FORMS[form](few(rank, options(batch, most))), batch, most)
        };
        Ok([memory(0)?, memory(1)?])
    }

    /// Writes this rank's part of a batch.
    fn write(&self, rank: &Rank, batch: &Batch) -> Result<()> {
        let rank = rank.rank();
        self.input.copy_from_host(&batch.inputs[rank])?;
        self.write_routing(rank, batch)
    }

    fn write_routing(&self, rank: usize, batch: &Batch) -> Result<()> {
        self.ids.copy_from_host(&batch.ids[rank])?;
        self.weights.copy_from_host(&batch.weights[rank])?;
        self.rows.fill_bytes(0xff)?;
        self.output.fill_bytes(0xff)
    }

    fn tokens(&self, count: usize) -> Tokens<'_> {
        Tokens { count, input: &self.input, ids: &self.ids, weights: &self.weights }
    }

    /// Enqueues a step whose experts leave the rows as they are.
    fn step(&self, count: usize) -> Result<()> {
        let Self { experts, stream, rows, output, .. } = self;
        experts.dispatch(self.tokens(count), stream)?;
        experts.group(rows, stream)?;
        experts.combine(rows, output, None, stream)
    }

    /// Checks the order of the rows, and the rows.
    fn check_rows(&self, rank: &Rank, batch: &Batch) -> Result<Layout> {
        let layout = self.check_order(rank, batch)?;
        let mut rows = vec![bf16::ZERO; self.rows.len()];
        self.rows.copy_to_host(&mut rows)?;
        assert_eq!(batch.count_wrong_rows(&layout, &rows), 0);
        Ok(layout)
    }

    fn check_order(&self, rank: &Rank, batch: &Batch) -> Result<Layout> {
        let layout = batch.layout(rank.rank());
        let read = |from: DeviceSlice<u32>| {
            let mut to = vec![0; from.len()];
            from.copy_to_host(&mut to)?;
            Ok::<_, devcomm::Error>(to)
        };
        assert_eq!(read(self.experts.groups().offsets)?, layout.offsets);
        assert_eq!(read(self.experts.groups().sizes)?, layout.sizes);
        let (origins, most) = (read(self.experts.origins())?, self.most(batch));
        for (at, source, token) in &layout.rows {
            assert_eq!(origins[*at] as usize, source * most + token, "row {at}");
        }
        Ok(layout)
    }

    fn most(&self, batch: &Batch) -> usize {
        self.input.len() / batch.hidden
    }

    /// Multiplies the rows by their experts' factors.
    fn apply(&self, rank: &Rank, batch: &Batch, layout: &Layout) -> Result<()> {
        let mut rows = vec![bf16::NAN; self.rows.len()];
        let first = rank.rank() * batch.local();
        for (expert, (at, size)) in layout.offsets.iter().zip(&layout.sizes).enumerate() {
            for at in *at as usize..(at + size) as usize {
                let (_, source, token) = layout.rows.iter().find(|row| row.0 == at).unwrap();
                let to = &mut rows[at * batch.hidden..][..batch.hidden];
                for (to, x) in to.iter_mut().zip(batch.row(*source, *token)) {
                    *to = bf16::from_f32(x.to_f32() * factor(first + expert));
                }
            }
        }
        self.rows.copy_from_host(&rows)
    }

    /// Checks the results.
    fn check_output(&self, expected: &[bf16]) -> Result<()> {
        let mut output = vec![bf16::ZERO; self.output.len()];
        self.output.copy_to_host(&mut output)?;
        let wrong = output.iter().zip(expected).position(|(got, want)| got != want);
        assert_eq!(wrong, None, "{:?}", wrong.map(|i| (output[i], expected[i])));
        let rest = &output[expected.len()..];
        assert!(rest.iter().all(|x| x.is_nan()), "wrote past the last token");
        Ok(())
    }
}

fn options(batch: &Batch, most: usize) -> ExpertParallelOptions {
    ExpertParallelOptions::new(batch.hidden, most, batch.experts, batch.top_k)
        .alignment(batch.alignment)
}

/// Returns options with few simulated blocks, which take time even without work.
fn few(rank: &Rank, options: ExpertParallelOptions) -> ExpertParallelOptions {
    if rank.is_simulated() { options.blocks(3).threads(96) } else { options }
}

// How a step runs, as an argument of `checked_step`.
const WHOLE: bool = false;
const IN_HALVES: bool = true;

/// Runs a step, in two halves or whole, and checks everything.
fn checked_step(rank: &Rank, memory: &Memory, batch: &Batch, in_halves: bool) -> Result<()> {
    let Memory { experts, stream, rows, output, .. } = memory;
    memory.write(rank, batch)?;
    let tokens = memory.tokens(batch.tokens[rank.rank()]);
    match in_halves {
        true => experts.start_dispatch(tokens, stream)?.receive()?,
        false => experts.dispatch(tokens, stream)?,
    }
    // Steps in halves also add the residual.
    let (residual, mine) = (in_halves.then(|| memory.residual.device_slice()), rank.rank());
    experts.group(rows, stream)?;
    let layout = memory.check_rows(rank, batch)?;
    memory.apply(rank, batch, &layout)?;
    match in_halves {
        true => experts.start_combine(rows, stream)?.receive(output, residual.as_ref())?,
        false => experts.combine(rows, output, residual.as_ref(), stream)?,
    }
    let host = self::residual(mine, batch.inputs[mine].len());
    let expected = batch.combined(mine, residual.is_some().then_some(&host), factor);
    memory.check_output(&expected)?;
    experts.check()
}

/// Returns the elements of a token: more than a warp's part of a row, and no whole number of parts.
fn hidden(ranks: usize) -> usize {
    if ranks == 2 { 1048 } else { 528 }
}

/// Runs whole steps of every routing on 2, 4 and 8 ranks, with this memory for each batch.
fn routed_steps(name: &str, memory: impl Fn(&Rank, &Batch, usize) -> Result<Memory> + Sync) {
    for ranks in [2, 4, 8] {
        on_gpus(name, ranks, |rank| {
            for (i, (routing, top_k)) in [
                (Routing::Random, 3),
                (Routing::Skewed, 8),
                (Routing::One, 2),
                (Routing::None, 1),
                (Routing::Repeated, 16),
            ]
            .into_iter()
            .enumerate()
            {
                // Each rank has another number of tokens, one of them none.
                let tokens: Vec<_> = (0..ranks).map(|rank| (rank * 3 + i) % 5).collect();
                let mut batch = Batch::new(hidden(ranks), 4 * ranks, top_k, &tokens, i as u64);
                batch.alignment = [1, 4][i % 2];
                let memory = memory(rank, &batch, 5)?;
                for launch in 0..3 {
                    batch.route(routing, launch);
                    checked_step(rank, &memory, &batch, launch == 1)?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn rows_go_to_their_experts_and_results_return() {
    routed_steps("rows_go_to_their_experts_and_results_return", Memory::of);
}

/// The kernels have no specialised code for these numbers of ranks.
#[test]
fn any_number_of_ranks_takes_part() {
    let name = "any_number_of_ranks_takes_part";
    for ranks in [1, 3, 5, 6, 7] {
        on_gpus(name, ranks, |rank| {
            let tokens: Vec<_> = (0..ranks).map(|rank| (rank + 2) % 4).collect();
            let mut batch = Batch::new(784, 2 * ranks, 3, &tokens, ranks as u64);
            let memories = Memory::of_each(rank, &batch, 4)?;
            // There are enough launches for banks to be used again after halves of steps.
            for launch in 0..if ranks == 3 { 5 } else { 2 } {
                let routing = [Routing::Random, Routing::Repeated][launch % 2];
                batch.route(routing, launch as u64);
                for memory in &memories {
                    checked_step(rank, memory, &batch, launch > 0)?;
                }
            }
            Ok(())
        });
    }
    on_gpus(name, 64, |rank| {
        let tokens: Vec<_> = (0..64).map(|rank| if rank % 8 == 0 { 2 } else { 0 }).collect();
        let batch = Batch::new(16, 128, 6, &tokens, 64).routed(Routing::Random, 1);
        for form in FORMS {
            let options = form(options(&batch, 2)).blocks(1).threads(32);
            let memory = Memory::new(rank, options, &batch, 2)?;
            checked_step(rank, &memory, &batch, WHOLE)?;
        }
        Ok(())
    });
}

#[test]
fn rows_are_short_or_long_and_experts_few_or_many() {
    let name = "rows_are_short_or_long_and_experts_few_or_many";
    on_gpus(name, 2, |rank| {
        let many = if rank.is_simulated() { 1 } else { 300 };
        for (hidden, experts, top_k, most) in [
            (8, 2, 1, many + 1),
            (8192, 1024, 16, many + 1),
            (256, 64, 8, 40 + many),
            (7168, 256, 8, many + 2),
        ] {
            let batch = Batch::new(hidden, experts, top_k, &[most, most - 1], 7);
            let batch = batch.routed(Routing::Random, 3);
            for memory in Memory::of_each(rank, &batch, most)? {
                for in_halves in [false, true] {
                    checked_step(rank, &memory, &batch, in_halves)?;
                }
            }
        }
        Ok(())
    });
}

/// One rank also has the most experts that a rank may have.
#[test]
fn tokens_have_any_number_of_a_thousand_experts() {
    let name = "tokens_have_any_number_of_a_thousand_experts";
    for ranks in [1, 2] {
        on_gpus(name, ranks, |rank| {
            for top_k in 1..=16 {
                let tokens = &[3, 2][..ranks];
                let batch = Batch::new(24, 1024, top_k, tokens, 7).routed(Routing::Random, 3);
                for memory in Memory::of_each(rank, &batch, 3)? {
                    checked_step(rank, &memory, &batch, top_k % 2 == 0)?;
                }
            }
            Ok(())
        });
    }
}

/// Steps follow each other without a wait, with other tokens each time.
#[test]
fn steps_follow_each_other_on_any_stream() {
    on_gpus("steps_follow_each_other_on_any_stream", 2, |rank| {
        let streams = [rank.stream()?, rank.stream()?];
        let batches: Vec<Batch> = (0..4)
            .map(|i| {
                let batch = Batch::new(264, 8, 2, &[i * 2, 5 - i], i as u64);
                batch.routed(Routing::Random, i as u64)
            })
            .collect();
        for mut memory in Memory::of_each(rank, &batches[0], 6)? {
            let comm = rank.communicator()?;
            let mut all = Vec::new();
            for batch in &batches {
                let own = (&batch.inputs[rank.rank()], &batch.ids[rank.rank()]);
                // A rank may have no tokens, but an allocation has an element.
                let input = comm.mem_alloc::<bf16>(own.0.len().max(1))?;
                let ids = comm.mem_alloc::<i32>(own.1.len().max(1))?;
                let weights = comm.mem_alloc::<f32>(own.1.len().max(1))?;
                input.copy_from_host(own.0)?;
                ids.copy_from_host(own.1)?;
                weights.copy_from_host(&batch.weights[rank.rank()])?;
                let output = comm.mem_alloc::<bf16>(6 * batch.hidden)?;
                output.fill_bytes(0xff)?;
                all.push((input, ids, weights, output));
            }
            for (i, (input, ids, weights, output)) in all.iter().enumerate() {
                let (stream, experts) = (&streams[i % 2], &memory.experts);
                let count = batches[i].tokens[rank.rank()];
                experts.dispatch(Tokens { count, input, ids, weights }, stream)?;
                experts.group(&memory.rows, stream)?;
                experts.combine(&memory.rows, output, None, stream)?;
            }
            for (batch, (.., output)) in batches.iter().zip(all) {
                memory.output = output;
                memory.check_output(&batch.combined(rank.rank(), None, |_| 1.0))?;
            }
        }
        Ok(())
    });
}

/// Dispatches follow each other without a combine between them, and combines without a dispatch.
#[test]
fn each_half_of_a_step_may_be_repeated() {
    on_gpus("each_half_of_a_step_may_be_repeated", 4, |rank| {
        let mut batch = Batch::new(520, 16, 4, &[3, 1, 0, 4], 1);
        let memories = Memory::of_each(rank, &batch, 4)?;
        for (launch, memory) in (0..5).flat_map(|launch| memories.iter().map(move |m| (launch, m)))
        {
            let Memory { experts, stream, rows, output, .. } = memory;
            batch.route(Routing::Random, launch);
            memory.write(rank, &batch)?;
            for _ in 0..3 {
                experts.dispatch(memory.tokens(batch.tokens[rank.rank()]), stream)?;
            }
            for _ in 0..2 {
                experts.group(rows, stream)?;
            }
            for _ in 0..3 {
                experts.combine(rows, output, None, stream)?;
            }
            memory.check_rows(rank, &batch)?;
            memory.check_output(&batch.combined(rank.rank(), None, |_| 1.0))?;
        }
        Ok(())
    });
}

/// A program with two objects may have two steps on their way.
#[test]
fn steps_of_two_objects_overlap() {
    on_gpus("steps_of_two_objects_overlap", 2, |rank| {
        let batches = [1, 2]
            .map(|seed| Batch::new(hidden(2), 8, 2, &[3, 4], seed).routed(Routing::Random, seed));
        let first = Memory::of(rank, &batches[0], 4)?;
        let second = Memory::of(rank, &batches[1], 4)?;
        let count = batches[0].tokens[rank.rank()];
        for _ in 0..2 {
            first.write(rank, &batches[0])?;
            second.write(rank, &batches[1])?;
            let on_the_way = first.experts.start_dispatch(first.tokens(count), &first.stream)?;
            second.step(count)?;
            on_the_way.receive()?;
            first.experts.group(&first.rows, &first.stream)?;
            let returning = first.experts.start_combine(&first.rows, &first.stream)?;
            second.step(count)?;
            returning.receive(&first.output, None)?;
            for (memory, batch) in [(&first, &batches[0]), (&second, &batches[1])] {
                memory.check_rows(rank, batch)?;
                memory.check_output(&batch.combined(rank.rank(), None, |_| 1.0))?;
            }
        }
        Ok(())
    });
}

/// Captures a step of `tokens` tokens, and replays it with routing that changes.
fn replay_steps(
    rank: &Rank,
    memory: &Memory,
    batch: &mut Batch,
    tokens: usize,
    replays: usize,
) -> Result<()> {
    let graph = memory.stream.capture(|| memory.step(tokens))?;
    memory.write(rank, batch)?;
    for replay in 0..replays {
        let routing = [Routing::Random, Routing::Skewed, Routing::Repeated][replay % 3];
        batch.route(routing, replay as u64);
        memory.write_routing(rank.rank(), batch)?;
        graph.launch(&memory.stream)?;
        memory.check_rows(rank, batch)?;
        memory.check_output(&batch.combined(rank.rank(), None, |_| 1.0))?;
    }
    memory.experts.check()
}

#[test]
fn a_thousand_replays_of_a_step_are_right() {
    on_gpus("a_thousand_replays_of_a_step_are_right", 2, |rank| {
        let [hidden, tokens, replays] =
            if rank.is_simulated() { [264, 3, 3] } else { [7168, 128, 1000] };
        let mut batch = Batch::new(hidden, 256, 8, &[tokens, tokens], 5);
        for form in FORMS {
            let memory = Memory::new(rank, form(options(&batch, tokens)), &batch, tokens)?;
            replay_steps(rank, &memory, &mut batch, tokens, replays)?;
        }
        Ok(())
    });
}

/// The steps run on other schedules of the simulator.
#[test]
fn steps_are_right_in_many_schedules() {
    let name = "steps_are_right_in_many_schedules";
    for simulation in [Simulation::new(2).weak(true), Simulation::new(4).preempt(true)] {
        Gpus::from(simulation).run_seeds(name, 1..6, |rank, seed| {
            let mut random = fastrand::Rng::with_seed(seed);
            let tokens: Vec<_> = (0..rank.n_ranks()).map(|_| random.usize(..4)).collect();
            let mut batch = Batch::new(72, 8, 3, &tokens, seed);
            let memories = Memory::of_each(rank, &batch, 4)?;
            for launch in 0..3 {
                batch.route(Routing::Repeated, seed + launch);
                for memory in &memories {
                    checked_step(rank, memory, &batch, launch == 2)?;
                }
            }
            Ok(())
        });
    }
}
