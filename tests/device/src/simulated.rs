//! The simulator as a machine.

use std::mem::offset_of;

use devcomm::sim::{
    self, Builder, Counters, DevComm, DevCommConfig, GinBarriers, LaunchConfig, LlA2a, LsaBarriers,
    ResourceBuffer, ResourceKey, Signals, Simulator,
};
use devcomm_device_test_kernels::{Extra, Range};

use devcomm_types::kernel::IntoArg;
use devcomm_types::{AbortBlock, StuckRecord, WaitFor, WaitKind, nccl};

use crate::machine::{Machine, Setup, TestKernel};

/// Simulated ranks.
pub struct Simulated {
    sim: Simulator,
    lsa_ranks: usize,
}

impl Simulated {
    /// `ranks` ranks that all reach each other by load and store, in the order of `seed`.
    pub fn new(ranks: usize, seed: u64) -> Self {
        Self::teams(ranks, ranks, seed)
    }

    /// Ranks in LSA teams of `lsa_ranks`.
    pub fn teams(ranks: usize, lsa_ranks: usize, seed: u64) -> Self {
        Self::of(Simulator::builder().ranks(ranks).lsa_ranks(lsa_ranks).seed(seed), lsa_ranks)
    }

    /// As [`teams`](Self::teams), with switches at any access.
    pub fn preempting(ranks: usize, lsa_ranks: usize, seed: u64) -> Self {
        let builder = Simulator::builder().ranks(ranks).lsa_ranks(lsa_ranks);
        Self::of(builder.seed(seed).preempt(true), lsa_ranks)
    }

    fn of(builder: Builder, lsa_ranks: usize) -> Self {
        Self { sim: builder.build().expect("a simulator"), lsa_ranks }
    }

    /// Launches `kernel` once, with what `setup` says; the error is the test's to look at.
    ///
    /// # Errors
    ///
    /// Those of the launch.
    pub fn try_run<K: TestKernel>(
        &self,
        kernel: K,
        setup: &Setup,
        n: u32,
    ) -> Result<Vec<Vec<u64>>, sim::Error> {
        let job = Job::new(self, setup);
        job.launch(self, kernel, setup, n, None)?;
        Ok((0..self.ranks()).map(|rank| job.out.read(rank)).collect())
    }
}

/// A device communicator whose waits look at an abort flag in simulated memory.
struct WithFlag<'a> {
    comm: sim::DevCommArg<'a>,
    flag: u64,
}

impl IntoArg<nccl::DevComm> for WithFlag<'_> {
    fn into_arg(self) -> nccl::DevComm {
        nccl::DevComm { abort_flag: self.flag as *mut u32, ..self.comm.into_arg() }
    }

    fn dev_comm(&self) -> Option<&nccl::DevComm> {
        self.comm.dev_comm()
    }
}

/// What a kernel left that an abort has ended.
#[derive(Debug)]
pub struct Ended {
    /// The second window of each rank.
    pub out: Vec<Vec<u64>>,
    /// What each rank's warps noted: block, thread, wait.
    pub records: Vec<Vec<(u32, u32, WaitFor)>>,
}

impl Simulated {
    /// Launches `kernel` with an abort flag in each rank, which is raised `before` the launch or by the kernel itself.
    ///
    /// # Panics
    ///
    /// If the launch fails.
    pub fn run_to_its_end<K: TestKernel>(
        &self,
        kernel: K,
        setup: &Setup,
        n: u32,
        before: bool,
    ) -> Ended {
        let job = Job::new(self, setup);
        let words = size_of::<AbortBlock>() / 4;
        let block = |rank| {
            let block = self.sim.buffer::<u32>(rank, words).expect("a buffer");
            let mut zeros = vec![0; words];
            zeros[0] = before.into();
            block.write(&zeros).expect("it fits");
            block
        };
        let blocks: Vec<_> = (0..self.ranks()).map(block).collect();
        job.launch(self, kernel, setup, n, Some(&blocks)).unwrap_or_else(|error| panic!("{error}"));
        let out = (0..self.ranks()).map(|rank| job.out.read(rank)).collect();
        Ended { out, records: blocks.iter().map(|block| records(&block.read())).collect() }
    }
}

/// The records of an [`AbortBlock`], as words.
fn records(block: &[u32]) -> Vec<(u32, u32, WaitFor)> {
    let long = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    let of_warps =
        block[offset_of!(AbortBlock, records) / 4..].chunks(size_of::<StuckRecord>() / 4);
    of_warps
        .filter_map(|r| {
            let kind = WaitKind::from_raw(r[0])?;
            let (wanted, seen) = (long(r[6], r[7]), long(r[8], r[9]));
            let (index, context, peer) = (r[2], r[3], r[4].cast_signed());
            Some((r[1], r[5], WaitFor { kind, index, context, peer, wanted, seen }))
        })
        .collect()
}

impl Machine for Simulated {
    fn ranks(&self) -> usize {
        self.sim.ranks()
    }

    fn lsa_ranks(&self) -> usize {
        self.lsa_ranks
    }

    fn launches(&self) -> usize {
        2
    }

    fn run_each_after<P: TestKernel, K: TestKernel>(
        &self,
        prepare: P,
        kernel: K,
        setup: &Setup,
        before: &[u32],
        ns: &[u32],
    ) -> Vec<Vec<Vec<u64>>> {
        let job = Job::new(self, setup);
        for &n in before {
            job.launch(self, prepare, setup, n, None).unwrap_or_else(|error| panic!("{error}"));
        }
        let one = |&n: &u32| {
            job.launch(self, kernel, setup, n, None).unwrap_or_else(|error| panic!("{error}"));
            (0..self.ranks()).map(|rank| job.out.read(rank)).collect()
        };
        ns.iter().map(one).collect()
    }
}

/// What kernels get.
struct Job {
    mail: sim::Window<u64>,
    out: sim::Window<u64>,
    comm: DevComm,
    keys: Keys,
}

/// Keys to what was asked for.
struct Keys {
    lsa: ResourceKey<LsaBarriers>,
    gin: Option<(ResourceKey<GinBarriers>, ResourceKey<Signals>, ResourceKey<Counters>)>,
    ll: ResourceKey<LlA2a>,
    buffer: ResourceKey<ResourceBuffer>,
}

impl Job {
    fn new(machine: &Simulated, setup: &Setup) -> Self {
        let sim = &machine.sim;
        let mut config = DevCommConfig {
            lsa_barriers: setup.lsa_barriers,
            lsa_multimem: setup.multimem,
            barriers: setup.hybrid_barriers,
            rail_gin_barriers: setup.rail_barriers,
            world_gin_barriers: setup.world_barriers,
            gin_connection: setup.gin,
            gin_contexts: setup.contexts,
            gin_strong_signals: setup.strong,
            ..Default::default()
        };
        let (ranks, (blocks, max_elements, element_size)) = (sim.ranks() as u32, setup.ll);
        let keys = Keys {
            lsa: config.add(LsaBarriers {
                ranks: machine.lsa_ranks as u32,
                count: setup.more_lsa_barriers,
            }),
            gin: (setup.gin != devcomm::GinConnectionType::None).then(|| {
                (
                    config.add(GinBarriers { ranks, count: setup.more_gin_barriers }),
                    config.add(Signals { count: setup.signals }),
                    config.add(Counters { count: setup.counters }),
                )
            }),
            ll: config.add(LlA2a { blocks, max_elements, element_size }),
            buffer: config.add(ResourceBuffer { bytes: setup.buffer, align: 128 }),
        };
        let job = Self {
            mail: sim.window(setup.mail).expect("a window"),
            out: sim.window(setup.out).expect("a window"),
            comm: sim.dev_comm(config).unwrap_or_else(|error| panic!("{error}")),
            keys,
        };
        for rank in 0..sim.ranks() {
            job.mail.write(rank, &vec![0; setup.mail]).expect("it fits");
            job.out.write(rank, &vec![Setup::UNTOUCHED; setup.out]).expect("it fits");
        }
        job
    }

    fn launch<K: TestKernel>(
        &self,
        machine: &Simulated,
        kernel: K,
        setup: &Setup,
        n: u32,
        flags: Option<&[sim::Buffer<u32>]>,
    ) -> Result<(), sim::Error> {
        let args = |rank: usize| {
            let comm = self.comm.rank(rank);
            let mut extra = Extra {
                buffer: comm.resource(self.keys.buffer),
                lsa: comm.resource(self.keys.lsa),
                ll: comm.resource(self.keys.ll),
                ..Default::default()
            };
            if let Some((gin, signals, counters)) = self.keys.gin {
                let (signals, counters) = (comm.resource(signals), comm.resource(counters));
                extra.gin = comm.resource(gin);
                extra.signals = Range { first: signals.first, count: signals.count };
                extra.counters = Range { first: counters.first, count: counters.count };
            }
            let flag = flags.map_or(0, |flags| flags[rank].address());
            (WithFlag { comm, flag }, self.mail.rank(rank), self.out.rank(rank), extra, n)
        };
        let config = LaunchConfig::new(setup.grid, setup.block);
        // SAFETY: the test makes the windows and resources that the kernel needs; they live until the launch returns.
        unsafe { machine.sim.launch(kernel, config, args) }.map(drop)
    }
}
