//! The measurement loop of a rank: checks every contender (one implementation of the measured
//! operation), then times them interleaved.

pub mod header;
pub mod sensors;

use std::rc::Rc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use devcomm::{
    CollectivesOptions, Communicator, Element, Event, Graph, Kernels, LaunchConfig, Rank, Stream,
    SymmetricBuffer,
};
use devcomm_bench_kernels::plain;
use fastrand::Rng;

use crate::base::options::{NcclSetting, RankOptions, RunOptions};
use crate::base::{KERNELS, Spread, gpu, ranks};
use crate::contenders::{Contender, Variant};
use crate::harness::sensors::{Reading, Sensors, sample};

/// A rank with its stream and its run options.
pub struct Harness<'a> {
    pub rank: &'a Rank,
    pub comm: &'a Communicator,
    pub stream: Stream,
    pub run: &'a RunOptions,
    /// Whether times are meaningful: on GPUs only.
    pub is_timed: bool,
    /// The sensors of the root rank's GPU.
    sensors: Option<Sensors>,
    /// Time limit of a wait for the stream.
    limit: Duration,
    /// The begin and the end of a timed batch.
    events: (Event, Event),
    /// The kernel of --between, and its memory: an element for each thread.
    between: Option<(Kernels, SymmetricBuffer<u32>)>,
}

/// A configuration of NCCL, with its communicator.
pub struct Nccl<'a> {
    /// `None` for NCCL's default.
    pub name: Option<String>,
    /// The communicator with the configuration; `None` for NCCL's default.
    own: Option<Communicator>,
    world: &'a Communicator,
}

impl Nccl<'_> {
    /// Returns its communicator: its own, or the world's for NCCL's default.
    pub fn comm(&self) -> &Communicator {
        self.own.as_ref().unwrap_or(self.world)
    }

    /// Returns whether this configuration of NCCL can make a difference: `zero` uses copy engines,
    /// which work on windows and reduce nothing, and `efficiency`, the policy for few blocks, is
    /// for memory that is not registered.
    pub fn matters(&self, variant: Variant, reduces: bool) -> bool {
        match self.name.as_deref() {
            Some("zero") => variant == Variant::NcclSym && !reduces,
            Some("efficiency") => variant == Variant::Nccl,
            _ => true,
        }
    }
}

/// Blocks and threads of the kernel of --between.
const BETWEEN: (u32, u32) = (128, 256);

/// A function that enqueues work, borrowed.
type Launches<'a> = &'a dyn Fn() -> devcomm::Result<()>;

/// Seconds per operation of each contender, in every round.
pub type Rounds = Vec<Vec<f64>>;

impl<'a> Harness<'a> {
    /// Creates the rank's harness. *Collective*.
    pub fn new(rank: &'a Rank, options: &RankOptions, run: &'a RunOptions) -> Result<Self> {
        let sensors = match rank.is_root() && !rank.is_simulated() {
            true => Sensors::open(&gpu::pci_bus_id(rank.context())?),
            false => None,
        };
        let comm = rank.communicator()?;
        let between = || -> Result<_> {
            let len = if rank.is_simulated() { 64 } else { BETWEEN.0 * BETWEEN.1 };
            Ok((Kernels::load(rank.context(), &KERNELS)?, comm.mem_alloc(len as usize)?))
        };
        Ok(Self {
            rank,
            comm,
            stream: rank.stream()?,
            run,
            is_timed: !rank.is_simulated(),
            sensors,
            limit: options.limit(),
            events: (rank.context().event()?, rank.context().event()?),
            between: run.between.then(between).transpose()?,
        })
    }

    /// Returns the configurations of NCCL that are compared. *Collective*.
    pub fn nccl(&self) -> Result<Vec<Nccl<'a>>> {
        let mut settings = self.run.nccl.clone();
        let has_choice = !self.rank.is_simulated() && self.rank.n_ranks() > 1;
        if settings.is_empty() {
            let names = if has_choice { &NcclSetting::DEFAULTS[..] } else { &["mixed"] };
            let parsed = names.iter().map(|name| name.parse().map_err(anyhow::Error::msg));
            settings = parsed.collect::<Result<_>>()?;
        }
        let setting = |NcclSetting { name, config }| {
            // All ranks have the same colour, and keep their order.
            let split = |config| self.comm.split(Some(0), self.rank.rank() as i32, config);
            let own = config.as_ref().map(split).transpose();
            let own = own.with_context(|| format!("--nccl {name}"))?.flatten();
            Ok(Nccl { name: own.is_some().then_some(name), own, world: self.comm })
        };
        settings.into_iter().map(setting).collect()
    }

    /// Returns memory with these elements, which is not registered.
    pub fn filled<T: Element>(&self, elements: &[T]) -> devcomm::Result<SymmetricBuffer<T>> {
        let buffer = self.comm.mem_alloc(elements.len())?;
        buffer.copy_from_host(elements)?;
        Ok(buffer)
    }

    /// Returns the options of `Collectives`.
    pub fn collectives(&self) -> CollectivesOptions {
        let options = CollectivesOptions::new();
        self.run.concurrent.map_or(options, |objects| options.concurrent(objects))
    }

    /// Returns `on_gpus` on GPUs, `simulated` on simulated GPUs, which are slower.
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

    /// Counts the wrong elements of each contender over all ranks and checks; `None` without
    /// checks. *Collective*.
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
            // The peers may still write to this rank's result.
            self.rank.barrier()?;
        }
        let mut wrong = None;
        for _ in 0..self.run.check {
            contender.outcome.poison()?;
            // No rank may write to a peer's result before the peer has poisoned it.
            self.rank.barrier()?;
            // The checked call runs as the timed ones do: in a graph, or as plain launches.
            if self.run.graph > 0 {
                let graph = self.stream.capture(|| (contender.checked)())?;
                graph.launch(&self.stream)?;
                self.finish()?;
            } else {
                (contender.checked)()?;
                self.finish()?;
            }
            let mine = contender.outcome.count_wrong()?;
            // This is also a barrier: no peer still writes to this rank when it poisons again.
            wrong = Some(wrong.unwrap_or(0) + ranks::total(self.rank, mine)?);
        }
        Ok(wrong)
    }

    /// Returns the times of all contenders in each of `rounds`, of the slowest rank, and on the
    /// root rank what its GPU's sensors tell meanwhile. *Collective*.
    pub fn time(
        &self,
        contenders: &[Contender<'_>],
        order: &mut Rng,
        rounds: usize,
    ) -> Result<(Rounds, Vec<Reading>)> {
        if contenders.is_empty() {
            return Ok((vec![Vec::new(); rounds], Vec::new()));
        }
        let mut graphs = Vec::new();
        if self.run.graph > 0 {
            for contender in contenders {
                graphs.push(self.graph(&*contender.timed, self.calls(contender))?);
            }
        }
        for contender in contenders {
            for _ in 0..self.run.warmup.min(contender.most_calls) {
                (contender.timed)()?;
            }
        }
        self.finish()?;
        let mut time =
            |begins: &dyn Fn(usize)| self.rounds(contenders, &graphs, order, rounds, begins);
        match &self.sensors {
            None => Ok((time(&|_| ())?, vec![Reading::default(); contenders.len()])),
            Some(sensors) => {
                let body = |running: Sender<usize>| {
                    time(&|i| {
                        // A sampler that has ended does not receive it.
                        let _ = running.send(i);
                    })
                };
                let (rounds, readings) = sample(|| sensors.read(), contenders.len(), body);
                Ok((rounds?, readings))
            }
        }
    }

    /// Does the same as [`time`](Self::time), with the kernel of --between before each call. The
    /// time of that kernel alone, in the same round, is subtracted, so that noise may leave less
    /// than 0. `None` without the flag. *Collective*.
    pub fn time_between(
        &self,
        contenders: &[Contender<'_>],
        order: &mut Rng,
        rounds: usize,
    ) -> Result<Option<Rounds>> {
        let Some((kernels, data)) = &self.between else { return Ok(None) };
        let config = LaunchConfig::new(self.choose(BETWEEN.0, 1), self.choose(BETWEEN.1, 64));
        let touch = || {
            let launch = plain::args(data.device_address(), data.len());
            let launch = launch.config(config.without_cooperation());
            // SAFETY: the buffer has the elements, and only this stream uses it.
            unsafe { launch.launch(&kernels.on(&self.stream)) }
        };
        let mut all = Vec::new();
        for contender in contenders {
            let timed = Rc::clone(&contender.timed);
            let work = move || touch().and_then(|()| timed());
            let after = Contender::new(contender.variant, work, ());
            all.push(Contender { most_calls: contender.most_calls, ..after });
        }
        // The last one is the kernel of --between alone; its variant has no meaning.
        all.push(Contender::new(Variant::Rust, touch, ()));
        let mut times = self.time(&all, order, rounds)?.0;
        for round in &mut times {
            let alone = round.pop().context("a round has no times")?;
            for (time, contender) in round.iter_mut().zip(contenders) {
                *time = (*time - alone) / f64::from(contender.operations);
            }
        }
        Ok(Some(times))
    }

    /// Times `rounds` rounds; calls `begins` with the index of each contender before it runs.
    fn rounds(
        &self,
        contenders: &[Contender<'_>],
        graphs: &[Graph],
        order: &mut Rng,
        rounds: usize,
        begins: &dyn Fn(usize),
    ) -> Result<Rounds> {
        let mut sequence: Vec<usize> = (0..contenders.len()).collect();
        let mut mine = Vec::new();
        for _ in 0..rounds {
            let mut times = vec![0.0; contenders.len()];
            order.shuffle(&mut sequence);
            for &i in &sequence {
                begins(i);
                let contender @ Contender { timed, operations, .. } = &contenders[i];
                let time = self.time_one(&**timed, self.calls(contender), graphs.get(i))?;
                times[i] = time / f64::from(*operations);
            }
            mine.extend(times);
        }
        let all = ranks::slowest(self.rank, &mine)?;
        Ok(all.chunks_exact(contenders.len()).map(<[f64]>::to_vec).collect())
    }

    /// Returns the calls of a contender in a batch, or in a graph.
    fn calls(&self, contender: &Contender<'_>) -> usize {
        self.run.iters.min(contender.most_calls)
    }

    /// Captures `calls` of `work` as a graph, and runs it once.
    fn graph(&self, work: Launches<'_>, calls: usize) -> Result<Graph> {
        let launches = || (0..calls).try_for_each(|_| work());
        let graph = self.stream.capture(launches)?;
        graph.launch(&self.stream)?;
        self.finish()?;
        Ok(graph)
    }

    /// Returns the seconds per launch of `work` in a few launches: enough to reject a slow one.
    /// *Collective*.
    pub fn try_out(&self, work: Launches<'_>) -> Result<f64> {
        const CALLS: usize = 5;
        work()?;
        self.time_one(work, CALLS, None)
    }

    /// Returns the seconds per launch of `work`: the median of a few batches. *Collective*.
    pub fn time_briefly(&self, work: Launches<'_>) -> Result<f64> {
        const BATCHES: usize = 3;
        // A library initialises on a first call, which cannot be captured.
        work()?;
        self.finish()?;
        let graph = (self.run.graph > 0).then(|| self.graph(work, self.run.iters)).transpose()?;
        let times: Result<Vec<f64>> =
            (0..BATCHES).map(|_| self.time_one(work, self.run.iters, graph.as_ref())).collect();
        Ok(Spread::of(times?).map_or(f64::INFINITY, |times| times.median))
    }

    /// Returns the seconds per call of `work` in one timed batch of `calls` calls, or of graphs
    /// with this number of calls. *Collective*.
    fn time_one(&self, work: Launches<'_>, calls: usize, graph: Option<&Graph>) -> Result<f64> {
        let (stream, run) = (&self.stream, self.run);
        self.rank.barrier()?;
        let (launches, calls_each, launch): (_, _, Launches<'_>) = match graph {
            Some(graph) => (run.graph, calls, &|| graph.launch(stream)),
            None => (calls, 1, work),
        };
        // An untimed launch aligns the ranks' GPUs, which leave the hosts' barrier one by one.
        launch()?;
        stream.record(&self.events.0)?;
        let start = Instant::now();
        (0..launches).try_for_each(|_| launch())?;
        let on_host = start.elapsed().as_secs_f64();
        stream.record(&self.events.1)?;
        self.finish()?;
        let on_gpu = f64::from(self.events.1.elapsed_ms(&self.events.0)?) / 1e3;
        let seconds = if run.host { on_host } else { on_gpu };
        Ok(seconds / (launches * calls_each) as f64)
    }
}
