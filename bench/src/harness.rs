//! The measurement loop of a rank: checks every contender (one implementation of the measured
//! operation), then times them interleaved.

use std::time::Duration;

use anyhow::Result;
use devcomm::{Communicator, Event, Graph, Rank, Stream};
use fastrand::Rng;

use crate::contender::{Contender, Work};
use crate::options::{RankOptions, RunOptions};
use crate::ranks;

/// A rank with its stream and its run options.
pub struct Harness<'a> {
    pub rank: &'a Rank,
    pub comm: &'a Communicator,
    pub stream: Stream,
    pub run: &'a RunOptions,
    /// Whether times are meaningful: on GPUs only.
    pub is_timed: bool,
    /// Time limit of a wait for the stream.
    limit: Duration,
    events: (Event, Event),
}

/// Seconds per operation of each contender, in every round.
pub type Rounds = Vec<Vec<f64>>;

impl<'a> Harness<'a> {
    /// Creates the rank's harness. *Collective*.
    pub fn new(rank: &'a Rank, options: &RankOptions, run: &'a RunOptions) -> Result<Self> {
        Ok(Self {
            rank,
            comm: rank.communicator()?,
            stream: rank.stream()?,
            run,
            is_timed: !rank.is_simulated(),
            limit: options.limit(),
            events: (rank.context().event()?, rank.context().event()?),
        })
    }

    /// `on_gpus` on GPUs, `simulated` on simulated GPUs, which are slower.
    pub fn choose<T>(&self, on_gpus: T, simulated: T) -> T {
        if self.rank.is_simulated() { simulated } else { on_gpus }
    }

    /// Prints progress to standard error.
    pub fn progress(&self, what: &str) {
        if self.rank.is_root() {
            eprintln!("{what}");
        }
    }

    /// Waits for the stream, up to the time limit.
    pub fn finish(&self) -> Result<()> {
        Ok(self.stream.synchronize_within(self.limit)?)
    }

    /// Wrong elements of each contender over all ranks and checks; `None` without checks.
    /// *Collective*.
    pub fn check(&self, contenders: &[Contender<'_>]) -> Result<Vec<Option<usize>>> {
        // Every rank's memory is ready, including flags that peers write.
        self.rank.barrier()?;
        contenders.iter().map(|contender| self.check_one(contender)).collect()
    }

    fn check_one(&self, contender: &Contender<'_>) -> Result<Option<usize>> {
        if self.run.graph > 0 {
            // NCCL initialises on a first call, which cannot be captured.
            (contender.checked)()?;
            self.finish()?;
        }
        let mut wrong = None;
        for _ in 0..self.run.check {
            contender.outcome.poison()?;
            // No rank may write to a peer's result before the peer has poisoned it.
            self.rank.barrier()?;
            // As it is timed: in a graph, or as plain launches.
            if self.run.graph > 0 {
                self.stream.capture(|| (contender.checked)())?.launch(&self.stream)?;
            } else {
                (contender.checked)()?;
            }
            self.finish()?;
            let mine = contender.outcome.count_wrong()?;
            wrong = Some(wrong.unwrap_or(0) + ranks::total(self.rank, mine)?);
        }
        Ok(wrong)
    }

    /// The times of all contenders in each round, of the slowest rank. *Collective*.
    pub fn time(&self, contenders: &[Contender<'_>], order: &mut Rng) -> Result<Rounds> {
        let mut graphs = Vec::new();
        if self.run.graph > 0 {
            for contender in contenders {
                graphs.push(self.graph(&contender.timed)?);
            }
        }
        for contender in contenders {
            for _ in 0..self.run.warmup {
                (contender.timed)()?;
            }
        }
        self.finish()?;
        let mut sequence: Vec<usize> = (0..contenders.len()).collect();
        let mut mine = Vec::new();
        for _ in 0..self.run.rounds {
            let mut times = vec![0.0; contenders.len()];
            order.shuffle(&mut sequence);
            for &i in &sequence {
                times[i] = self.time_one(&contenders[i], graphs.get(i))?;
            }
            mine.extend(times);
        }
        let all = ranks::slowest(self.rank, &mine)?;
        Ok(all.chunks_exact(contenders.len()).map(<[f64]>::to_vec).collect())
    }

    /// Captures `iters` launches as a graph, and runs it once.
    fn graph(&self, work: &Work<'_>) -> Result<Graph> {
        let launches = || (0..self.run.iters).try_for_each(|_| work());
        let graph = self.stream.capture(launches)?;
        graph.launch(&self.stream)?;
        self.finish()?;
        Ok(graph)
    }

    /// Seconds per operation, over one timed batch.
    fn time_one(&self, contender: &Contender<'_>, graph: Option<&Graph>) -> Result<f64> {
        let (stream, run) = (&self.stream, self.run);
        self.rank.barrier()?;
        let (launches, launch): (_, &dyn Fn() -> devcomm::Result<()>) = match graph {
            Some(graph) => (run.graph, &|| graph.launch(stream)),
            None => (run.iters, &*contender.timed),
        };
        // An untimed launch, which aligns the ranks' GPUs.
        launch()?;
        stream.record(&self.events.0)?;
        (0..launches).try_for_each(|_| launch())?;
        stream.record(&self.events.1)?;
        self.finish()?;
        let operations = run.batch() as f64 * f64::from(contender.operations);
        Ok(f64::from(self.events.1.elapsed_ms(&self.events.0)?) / 1e3 / operations)
    }
}
