//! GPUs, seen from one rank.

use std::path::PathBuf;

use anyhow::{Context, Result};
use devcomm::{Communicator, Event, Graph, KernelSet, Kernels, Rank, Stream};

use super::Options;
use super::machine::{Machine, Way, Ways};
use super::row::Rounds;
use super::variant::{Choice, Variant};
use crate::files::Files;
use crate::options::RunOptions;
use crate::ranks;
use crate::stats::Shuffle;

/// What a rank measures with.
pub struct Gpus<'a> {
    pub rank: &'a Rank,
    pub comm: &'a Communicator,
    pub stream: Stream,
    pub options: &'a Options,
    events: (Event, Event),
}

impl<'a> Gpus<'a> {
    /// This rank's.
    pub fn new(rank: &'a Rank, options: &'a Options) -> Result<Self> {
        Ok(Self {
            rank,
            comm: rank.communicator()?,
            stream: rank.stream()?,
            options,
            events: (rank.context().event()?, rank.context().event()?),
        })
    }

    /// The kernels of `name` in Rust, of `set` and compiled by the driver, and in C++: those that were chosen and are there.
    pub fn kernels(
        &self,
        choice: &mut Choice,
        set: &KernelSet,
        name: &str,
    ) -> Result<Vec<(Variant, Kernels)>> {
        let mut kernels = Vec::new();
        if choice.has(Variant::Rust) {
            kernels.push((Variant::Rust, self.rank.load(set)?));
        }
        if choice.has(Variant::Cpp) {
            match self.twin(name) {
                Ok(module) => {
                    let twin = Kernels::load_files(self.rank.context(), &[module]);
                    kernels.push((Variant::Cpp, twin.context("the C++ twin does not load")?));
                }
                Err(why) => choice.leave_out(Variant::Cpp, why)?,
            }
        }
        Ok(kernels)
    }

    /// The file of a twin in C++.
    fn twin(&self, name: &str) -> Result<PathBuf> {
        let files = Files::find(self.options.twins.as_deref())?;
        let module = files.cpp(&[name]).into_iter().find(|module| module.is_file());
        module.with_context(|| format!("{} has no {name} in C++", files.folder().display()))
    }

    fn run(&self) -> &RunOptions {
        &self.options.run
    }

    /// Waits for the stream, for as long as a batch may take.
    pub fn finish(&self) -> Result<()> {
        Ok(self.stream.synchronize_within(self.options.ranks.limit())?)
    }

    /// A batch of `iters` as a graph, run once.
    fn graph(&self, way: &dyn Way) -> Result<Graph> {
        let batch = || (0..self.run().iters).try_for_each(|_| way.enqueue());
        let graph = self.stream.capture(batch)?;
        graph.launch(&self.stream)?;
        self.finish()?;
        Ok(graph)
    }

    /// Seconds of an operation, over a batch.
    fn time_one(&self, way: &dyn Way, graph: Option<&Graph>) -> Result<f64> {
        let (stream, run) = (&self.stream, self.run());
        self.rank.barrier()?;
        let (launches, launch): (_, &dyn Fn() -> Result<()>) = match graph {
            Some(graph) => (run.graph, &|| Ok(graph.launch(stream)?)),
            None => (run.iters, &|| way.enqueue()),
        };
        // Not timed: behind it the ranks' GPUs are in step.
        launch()?;
        stream.record(&self.events.0)?;
        (0..launches).try_for_each(|_| launch())?;
        stream.record(&self.events.1)?;
        self.finish()?;
        let operations = run.batch() as f64 * f64::from(way.operations());
        Ok(f64::from(self.events.1.elapsed_ms(&self.events.0)?) / 1e3 / operations)
    }
}

impl Machine for Gpus<'_> {
    fn meet(&self) -> Result<()> {
        Ok(self.rank.barrier()?)
    }

    fn set_up(&self, way: &dyn Way) -> Result<()> {
        if self.run().graph > 0 {
            way.enqueue_checked()?;
            self.finish()?;
        }
        Ok(())
    }

    fn run_once(&self, work: &dyn Fn() -> Result<()>) -> Result<()> {
        if self.run().graph > 0 {
            self.stream.capture(work)?.launch(&self.stream)?;
        } else {
            work()?;
        }
        self.finish()
    }

    fn total(&self, mine: usize) -> Result<usize> {
        ranks::total(self.rank, mine)
    }

    fn time(&self, ways: &Ways<'_>, order: &mut Shuffle) -> Result<Option<Rounds>> {
        let mut graphs = Vec::new();
        if self.run().graph > 0 {
            for way in ways {
                graphs.push(self.graph(way.as_ref())?);
            }
        }
        for way in ways {
            for _ in 0..self.run().warmup {
                way.enqueue()?;
            }
        }
        self.finish()?;
        let mut mine = Vec::new();
        for _ in 0..self.run().rounds {
            let mut times = vec![0.0; ways.len()];
            for i in order.order(ways.len()) {
                times[i] = self.time_one(ways[i].as_ref(), graphs.get(i))?;
            }
            mine.extend(times);
        }
        let all = ranks::slowest(self.rank, &mine)?;
        Ok(Some(all.chunks_exact(ways.len()).map(<[f64]>::to_vec).collect()))
    }

    fn is_root(&self) -> bool {
        self.rank.is_root()
    }
}
