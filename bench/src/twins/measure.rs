//! Checks a case on all contestants, and times them in turns.

use anyhow::{Context, Result};
use devcomm::{Graph, Kernels, Stream};

use super::Job;
use super::row::{Label, Rounds, TwinRow};
use crate::ranks;

/// A kernel with its windows and its launch configuration.
pub trait Case {
    /// What the row is called.
    fn label(&self) -> Label;

    /// Registers a thread of the kernel that is timed.
    fn registers(&self, kernels: &Kernels) -> devcomm::Result<u32>;

    /// Launches the kernel that is timed.
    fn launch(&self, kernels: &Kernels, stream: &Stream) -> devcomm::Result<()>;

    /// Operations in a launch: a row tells the time of one.
    fn operations(&self) -> u32 {
        1
    }

    /// Runs the kernel once and counts this rank's wrong elements. *Collective*.
    fn count_wrong(&self, job: &Job<'_>, kernels: &Kernels) -> Result<usize>;
}

impl Job<'_> {
    /// Checks the case and measures it: one row. *Collective*.
    pub fn row(&mut self, case: &impl Case) -> Result<()> {
        let label = case.label();
        let Label { kernel, dtype, bytes, blocks, threads } = label;
        self.say(&format!("{kernel} {dtype} {bytes} B {blocks}x{threads} ..."));
        let wrong = self.check(case)?;
        let rounds = self.time_all(case)?;
        let of = |kernels| case.registers(kernels);
        let registers = [of(&self.contestants[0])?, of(&self.contestants[1])?];
        let row = TwinRow::new(label, registers, &rounds, wrong);
        self.report.rows.push(row.context("there were no rounds")?);
        Ok(())
    }

    /// The wrong elements of Rust and of C++ over all ranks; `None` when nothing is to be checked. *Collective*.
    pub fn check(&self, case: &impl Case) -> Result<Option<[usize; 2]>> {
        if self.options.run.check == 0 {
            return Ok(None);
        }
        let of = |kernels| -> Result<usize> {
            ranks::total(self.rank, case.count_wrong(self, kernels)?)
        };
        Ok(Some([of(&self.contestants[0])?, of(&self.contestants[1])?]))
    }

    /// Waits for the stream, for as long as a batch may take.
    pub fn finish_batch(&self) -> Result<()> {
        Ok(self.stream.synchronize_within(self.options.ranks.limit())?)
    }

    /// The times of each round, of the slowest rank. *Collective*.
    fn time_all(&mut self, case: &impl Case) -> Result<Rounds> {
        let graphs = match self.options.run.graph {
            0 => None,
            _ => Some(self.graphs(case)?),
        };
        for kernels in &self.contestants {
            for _ in 0..self.options.run.warmup {
                case.launch(kernels, &self.stream)?;
            }
        }
        self.finish_batch()?;
        let mut mine = Vec::new();
        for _ in 0..self.options.run.rounds {
            let mut times = [0.0; 3];
            for contestant in self.order.order(3) {
                let graph = graphs.as_ref().map(|graphs| &graphs[contestant]);
                times[contestant] = self.time_one(case, contestant, graph)?;
            }
            mine.extend(times);
        }
        let all = ranks::slowest(self.rank, &mine)?;
        Ok(all.chunks_exact(3).map(|round| std::array::from_fn(|i| round[i])).collect())
    }

    /// Seconds of an operation, over a batch.
    fn time_one(&self, case: &impl Case, contestant: usize, graph: Option<&Graph>) -> Result<f64> {
        let (kernels, stream) = (&self.contestants[contestant], &self.stream);
        self.rank.barrier()?;
        // Not timed: behind it the ranks' GPUs are in step.
        case.launch(kernels, stream)?;
        stream.record(&self.events.0)?;
        match graph {
            Some(graph) => {
                for _ in 0..self.options.run.graph {
                    graph.launch(stream)?;
                }
            }
            None => {
                for _ in 0..self.options.run.iters {
                    case.launch(kernels, stream)?;
                }
            }
        }
        stream.record(&self.events.1)?;
        self.finish_batch()?;
        let operations = self.options.run.batch() as f64 * f64::from(case.operations());
        Ok(f64::from(self.events.1.elapsed_ms(&self.events.0)?) / 1e3 / operations)
    }

    /// A batch of each contestant as a graph, run once.
    fn graphs(&self, case: &impl Case) -> Result<[Graph; 3]> {
        let capture = |kernels| {
            self.stream.capture(|| {
                (0..self.options.run.iters).try_for_each(|_| case.launch(kernels, &self.stream))
            })
        };
        let [a, b, c] = &self.contestants;
        let graphs = [capture(a)?, capture(b)?, capture(c)?];
        for graph in &graphs {
            graph.launch(&self.stream)?;
        }
        self.finish_batch()?;
        Ok(graphs)
    }
}
