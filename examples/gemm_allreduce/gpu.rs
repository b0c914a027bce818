//! The kernel on GPUs, beside cuBLASLt and `ncclAllReduce`.

use anyhow::{Context as _, Result, ensure};
use comfy_table::{CellAlignment, Table, presets};
use devcomm::kernels::GemmForm;
use devcomm::{
    Buffer, Communicator, Event, GemmAllReduce, GemmOutput, KERNELS, Rank, ReduceOp, Stream,
    SymmetricBuffer,
};
use half::bf16;

use crate::cublaslt::{CublasLt, Output, Plan};
use crate::options::{Form, Options};
use crate::problem::{Factor, Problem};

/// What is compared is timed in turns, and the median turn counts.
const TURNS: usize = 11;
/// About how long a turn takes, in microseconds, and how many calls it has at most.
const TURN_US: f64 = 4000.0;
const MOST_CALLS: f64 = 40.0;

/// Runs all problems on this rank, in buffers that are large enough for each.
pub fn run(rank: &Rank, options: &Options, problems: &[Problem]) -> Result<()> {
    let comm = rank.communicator()?;
    let most = |f: fn(&Problem) -> usize| problems.iter().map(f).max().unwrap_or(1);
    let (compiled, stream) = (rank.load(&KERNELS)?, rank.stream()?);
    let (m, n) = (most(|p| p.m), most(|p| p.n));
    let form = |form| GemmAllReduce::with_form(rank, comm, &compiled, &stream, form, m, n);
    let gemm = match options.form {
        Form::Auto => GemmAllReduce::new(rank, comm, &compiled, &stream, m, n),
        Form::Wgmma => form(GemmForm::Wgmma),
        Form::Mma => form(GemmForm::Mma),
    }?;
    let elements = most(|p| p.m * p.n);
    let cublaslt = CublasLt::load(comm)?;
    let job = Job {
        rank,
        comm,
        options,
        gemm,
        a: comm.mem_alloc(most(|p| p.m * p.k))?,
        b: comm.mem_alloc(most(|p| p.n * p.k))?,
        c: GemmOutput::new(rank, comm, elements)?,
        theirs: comm.mem_alloc(elements)?,
        theirs_f32: comm.mem_alloc(if cublaslt.is_some() { elements } else { 1 })?,
        stream: &stream,
        events: (rank.context().event()?, rank.context().event()?),
    };
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header([
        "m",
        "n",
        "k",
        "us",
        "#wrong",
        "gemm us",
        "TFLOP/s",
        "cublasLt us",
        "TFLOP/s",
        "rate/cublasLt",
        "cublasLt+nccl us",
        "kernel/theirs",
    ]);
    if rank.is_root() {
        println!(
            "{} x {}, {:?} form, k terms a rank; median of {TURNS} turns, slowest rank",
            rank.n_ranks(),
            rank.context().device_name()?,
            job.gemm.form(),
        );
        if cublaslt.is_none() {
            println!(
                "cuBLASLt (libcublasLt.so) cannot be loaded: only sampled elements are compared"
            );
        }
        println!();
    }
    let done = problems.iter().try_for_each(|problem| {
        let row = job.run(*problem, cublaslt.as_ref());
        table.add_row(row.with_context(|| format!("{problem:?}"))?);
        anyhow::Ok(())
    });
    if rank.is_root() && !table.is_empty() {
        for column in table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        println!("{table}\n");
    }
    done
}

struct Job<'a> {
    rank: &'a Rank,
    comm: &'a Communicator,
    options: &'a Options,
    gemm: GemmAllReduce<'a>,
    a: SymmetricBuffer<bf16>,
    b: SymmetricBuffer<bf16>,
    c: GemmOutput,
    theirs: SymmetricBuffer<bf16>,
    theirs_f32: SymmetricBuffer<f32>,
    stream: &'a Stream,
    events: (Event, Event),
}

impl Job<'_> {
    /// Checks a problem and measures it: the table's row.
    fn run(&self, problem: Problem, cublaslt: Option<&CublasLt>) -> Result<Vec<String>> {
        let (me, ranks) = (self.rank.rank(), self.rank.n_ranks());
        let shape = [problem.m, problem.n, problem.k];
        self.a.copy_from_host(&problem.factor(Factor::A, me))?;
        self.b.copy_from_host(&problem.factor(Factor::B, me))?;
        // An element that nobody writes stays a NaN.
        self.c.fill(0xff)?;
        self.rank.barrier()?;
        self.gemm.launch_alone(&self.a, &self.b, &self.c, shape)?;
        self.stream.synchronize()?;
        let alone = self.result(problem)?;
        let samples = problem.samples(self.options.samples);
        let mut wrong = problem.count_wrong(me..me + 1, &alone, samples);
        drop(alone);

        self.c.fill(0xff)?;
        self.rank.barrier()?;
        self.gemm.launch(&self.a, &self.b, &self.c, shape)?;
        self.stream.synchronize()?;
        let ours = self.result(problem)?;
        wrong += problem.count_wrong(0..ranks, &ours, problem.samples(self.options.samples));
        let plan = |output| cublaslt.map_or(Ok(None), |library| library.plan(shape, output));
        if let Some(exact) = plan(Output::F32)? {
            wrong += self.compare(problem, &exact, &ours)?;
        }
        drop(ours);
        let wrong = self.all([wrong as f64], |a, b| a + b)?[0];
        ensure!(wrong == 0.0, "{wrong} elements are wrong, over all ranks");
        let mut row: Vec<String> = shape.iter().map(usize::to_string).collect();
        if self.options.untimed {
            row.extend([String::new(), "0".to_owned()]);
            return Ok(row);
        }
        self.a.copy_from_host(&problem.noise(Factor::A, me))?;
        self.b.copy_from_host(&problem.noise(Factor::B, me))?;
        self.rank.barrier()?;
        self.measure(shape, plan(Output::Bf16)?.as_ref(), &mut row)?;
        Ok(row)
    }

    /// The first elements of C.
    fn result(&self, problem: Problem) -> Result<Vec<bf16>> {
        let mut c = vec![bf16::ZERO; problem.m * problem.n];
        self.c.copy_to_host(&mut c)?;
        Ok(c)
    }

    /// How many elements are not the rounded ones of cuBLASLt's and NCCL's sum in f32.
    fn compare(&self, problem: Problem, plan: &Plan<'_>, ours: &[bf16]) -> Result<usize> {
        let sum = self.theirs_f32.slice(..ours.len())?;
        // SAFETY: the buffers have the elements of the largest problem.
        unsafe { plan.enqueue(&self.a, &self.b, sum.device_address(), self.stream)? };
        self.comm.all_reduce(&sum, &sum, ReduceOp::Sum, self.stream)?;
        self.stream.synchronize()?;
        let mut theirs = vec![0.0_f32; problem.m * problem.n];
        self.theirs_f32.copy_to_host(&mut theirs)?;
        let differs = |(ours, theirs): &(&bf16, &f32)| **ours != bf16::from_f32(**theirs);
        Ok(ours.iter().zip(&theirs).filter(differs).count())
    }

    /// Adds what was measured to the row.
    fn measure(
        &self,
        shape: [usize; 3],
        plan: Option<&Plan<'_>>,
        row: &mut Vec<String>,
    ) -> Result<()> {
        let [m, n, k] = shape;
        let sum = self.theirs.slice(..m * n)?;
        let ours = || self.gemm.launch(&self.a, &self.b, &self.c, shape);
        let alone = || self.gemm.launch_alone(&self.a, &self.b, &self.c, shape);
        let product = || {
            plan.map_or(Ok(()), |plan| {
                // SAFETY: the buffers have the elements of the largest problem.
                unsafe { plan.enqueue(&self.a, &self.b, sum.device_address(), self.stream) }
            })
        };
        let both = || {
            product()?;
            self.comm.all_reduce(&sum, &sum, ReduceOp::Sum, self.stream)
        };
        let works: [&dyn Fn() -> devcomm::Result<()>; 4] = [&ours, &alone, &product, &both];
        // All ranks make the same number of calls.
        let [once] = self.all([self.time(works[0], 1)?], f64::max)?;
        let calls = (TURN_US / once).clamp(2.0, MOST_CALLS) as usize;
        let mut turns = [const { Vec::new() }; 4];
        for _ in 0..TURNS {
            for (turns, work) in turns.iter_mut().zip(works) {
                turns.push(self.time(work, calls)?);
            }
        }
        let median = |mut turns: Vec<f64>| {
            turns.sort_by(f64::total_cmp);
            turns[turns.len() / 2]
        };
        let [ours, alone, product, both] = self.all(turns.map(median), f64::max)?;
        let rate = |us: f64| 2.0 * (m * n) as f64 * k as f64 / us / 1e6;
        row.extend([format!("{ours:.2}"), "0".to_owned()]);
        row.extend([format!("{alone:.2}"), format!("{:.1}", rate(alone))]);
        if plan.is_some() {
            row.extend([format!("{product:.2}"), format!("{:.1}", rate(product))]);
            row.extend([format!("{:.3}", product / alone), format!("{both:.2}")]);
            row.push(format!("{:.3}", ours / both));
        }
        Ok(())
    }

    /// Microseconds that one of so many calls takes on the GPU.
    fn time(&self, work: &dyn Fn() -> devcomm::Result<()>, calls: usize) -> Result<f64> {
        self.rank.barrier()?;
        work()?;
        self.stream.record(&self.events.0)?;
        for _ in 0..calls {
            work()?;
        }
        self.stream.record(&self.events.1)?;
        self.stream.synchronize()?;
        Ok(f64::from(self.events.1.elapsed_ms(&self.events.0)?) * 1e3 / calls as f64)
    }

    /// Numbers of each rank, put together over all.
    fn all<const N: usize>(&self, mine: [f64; N], both: fn(f64, f64) -> f64) -> Result<[f64; N]> {
        let bytes: Vec<u8> = mine.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut sum: Option<[f64; N]> = None;
        for row in self.rank.all_gather(&bytes)? {
            let numbers: Vec<f64> =
                row.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
            let numbers: [f64; N] =
                numbers.try_into().ok().context("a rank sent something else")?;
            sum = Some(match sum {
                None => numbers,
                Some(sum) => std::array::from_fn(|i| both(sum[i], numbers[i])),
            });
        }
        sum.context("no rank sent anything")
    }
}
