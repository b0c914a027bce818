//! The resources of one rank for a test kernel, and its launch.

use devcomm::{
    Communicator, Counters, DevCommRequirements, DevCommResource, Error, GinBarriers,
    GinConnectionType, Kernel, LlA2a, LsaBarriers, Rank, ResourceBuffer, Signals, Stream, Window,
    WindowFlags,
};
use devcomm_device_test_kernels::{Args, Extra, Range};

use crate::KERNELS;

/// The launch configuration, windows and device-communicator resources of a test kernel.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Blocks.
    pub grid: u32,
    /// Threads per block.
    pub block: u32,
    /// 64-bit words of the first window, which is zeroed.
    pub mail: usize,
    /// Words of the second window, which is filled with [`UNTOUCHED`](Self::UNTOUCHED).
    pub out: usize,
    /// LSA barriers.
    pub lsa_barriers: u32,
    /// Additional LSA barriers, `Extra::lsa`.
    pub more_lsa_barriers: u32,
    /// Whether there is a multicast mapping of the LSA team.
    pub multimem: bool,
    /// Bytes of a resource buffer, `Extra::buffer`.
    pub buffer: usize,
    /// Blocks, elements and bytes per element of `Extra::ll`.
    pub ll: (u32, u32, u32),
    /// The GIN connection type.
    pub gin: GinConnectionType,
    /// GIN contexts.
    pub contexts: u32,
    /// GIN signals, `Extra::signals`.
    pub signals: u32,
    /// GIN counters, `Extra::counters`.
    pub counters: u32,
    /// World GIN barriers.
    pub world_barriers: u32,
    /// Additional GIN barriers of the team that the connections span, `Extra::gin`.
    pub more_gin_barriers: u32,
    /// Rail GIN barriers.
    pub rail_barriers: u32,
    /// Hybrid barriers.
    pub hybrid_barriers: u32,
    /// Whether signals are strong by default.
    pub strong: bool,
    /// Whether the first window may have VA signals.
    pub va: bool,
}

impl Setup {
    /// A word of the second window that was not written.
    pub const UNTOUCHED: u64 = u64::MAX;

    /// Returns a setup of `grid` blocks of `block` threads, with an LSA barrier per block, and a
    /// word of `out` per thread.
    pub fn new(grid: u32, block: u32) -> Self {
        Self {
            grid,
            block,
            mail: 1024,
            out: (grid * block) as usize,
            lsa_barriers: grid,
            more_lsa_barriers: 0,
            multimem: false,
            buffer: 0,
            ll: (0, 0, 0),
            gin: GinConnectionType::None,
            contexts: 4,
            signals: 0,
            counters: 0,
            world_barriers: 0,
            more_gin_barriers: 0,
            rail_barriers: 0,
            hybrid_barriers: 0,
            strong: true,
            va: false,
        }
    }

    /// Does the same as [`new`](Self::new), with GIN: all ranks connected, two signals and two
    /// counters.
    pub fn with_gin(grid: u32, block: u32) -> Self {
        let (gin, signals, counters) = (GinConnectionType::Full, 2, 2);
        Self { gin, signals, counters, ..Self::new(grid, block) }
    }
}

/// A kernel of `devcomm-device-test-kernels`.
pub trait TestKernel: Kernel<Args = Args> {}

impl<K: Kernel<Args = Args>> TestKernel for K {}

/// One rank's windows, device communicator and stream, to launch test kernels.
pub struct Job {
    mail: Window<u64>,
    out: Window<u64>,
    dev_comm: DevCommResource,
    extra: Extra,
    stream: Stream,
}

impl Job {
    /// Creates the resources of `setup`, and loads the kernels. *Collective*.
    ///
    /// # Errors
    ///
    /// Those of the host API.
    pub fn new(rank: &Rank, setup: &Setup) -> Result<Self, Error> {
        rank.load(&KERNELS)?;
        let comm = rank.communicator()?;
        let (mail, out) = windows(comm, setup)?;
        let (dev_comm, extra) = dev_comm(comm, setup)?;
        Ok(Self { mail, out, dev_comm, extra, stream: rank.stream()? })
    }

    /// Launches a kernel, without waiting for it.
    ///
    /// # Errors
    ///
    /// Those of the launch.
    pub fn launch<K: TestKernel>(&self, setup: &Setup, n: u32) -> Result<(), Error> {
        let args = (&self.dev_comm, &self.mail, &self.out, self.extra, n);
        // SAFETY: the setup has the windows and resources that the kernel needs; callers wait for
        // all ranks before they drop this `Job`.
        unsafe { K::with_args(args).grid(setup.grid).block(setup.block).launch(&self.stream) }
    }

    /// Returns the stream on which kernels are launched.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns the device communicator.
    pub fn dev_comm(&self) -> &DevCommResource {
        &self.dev_comm
    }

    /// Returns the words of the second window.
    ///
    /// # Errors
    ///
    /// Those of the copy.
    pub fn out(&self) -> Result<Vec<u64>, Error> {
        let mut words = vec![0; self.out.len()];
        self.out.copy_to_host(&mut words)?;
        Ok(words)
    }
}

fn windows(comm: &Communicator, setup: &Setup) -> Result<(Window<u64>, Window<u64>), Error> {
    let mail = if setup.va {
        let flags = WindowFlags::COLL_SYMMETRIC | WindowFlags::STRICT_ORDERING;
        comm.register_window(&comm.mem_alloc::<u64>(setup.mail)?, flags)?
    } else {
        comm.window(setup.mail)?
    };
    let out = comm.window(setup.out)?;
    mail.fill_bytes(0)?;
    out.fill_bytes(0xff)?;
    Ok((mail, out))
}

fn dev_comm(comm: &Communicator, setup: &Setup) -> Result<(DevCommResource, Extra), Error> {
    let mut requirements =
        DevCommRequirements::new().lsa_barriers(setup.lsa_barriers).lsa_multimem(setup.multimem);
    let team = comm.team_lsa()?;
    // The team that the GIN connections span.
    let connected =
        if setup.gin == GinConnectionType::Rail { comm.team_rail()? } else { comm.team_world()? };
    let (blocks, max_elements, element_size) = setup.ll;
    let lsa = requirements.add(LsaBarriers { team, count: setup.more_lsa_barriers });
    let ll = (blocks > 0).then(|| requirements.add(LlA2a { blocks, max_elements, element_size }));
    let buffer = (setup.buffer > 0)
        .then(|| requirements.add(ResourceBuffer { bytes: setup.buffer, align: 128 }));
    let gin = (setup.gin != GinConnectionType::None).then(|| {
        (
            requirements.add(GinBarriers { team: connected, count: setup.more_gin_barriers }),
            requirements.add(Signals { count: setup.signals }),
            requirements.add(Counters { count: setup.counters }),
        )
    });
    if gin.is_some() {
        requirements = requirements
            .gin_connection(setup.gin)
            .gin_contexts(setup.contexts)
            .gin_strong_signals(setup.strong)
            .gin_va_signals(setup.va)
            .world_gin_barriers(setup.world_barriers)
            .rail_gin_barriers(setup.rail_barriers)
            .barriers(setup.hybrid_barriers);
    }
    let created = comm.create_dev_comm(requirements)?;
    let mut extra = Extra { lsa: created.resource(lsa)?, ..Default::default() };
    if let Some(ll) = ll {
        extra.ll = created.resource(ll)?;
    }
    if let Some(buffer) = buffer {
        extra.buffer = created.resource(buffer)?;
    }
    if let Some((gin, signals, counters)) = gin {
        let (signals, counters) = (created.resource(signals)?, created.resource(counters)?);
        extra.gin = created.resource(gin)?;
        extra.signals = Range { first: signals.first, count: signals.count };
        extra.counters = Range { first: counters.first, count: counters.count };
    }
    Ok((created, extra))
}

/// Checks that kernels still run: data crosses a barrier of a new device communicator.
///
/// # Errors
///
/// Those of the host API. Panics if the data is wrong.
pub fn assert_kernels_run(rank: &Rank) -> Result<(), Error> {
    let setup = Setup::new(2, 64);
    let job = Job::new(rank, &setup)?;
    rank.barrier()?;
    // Three rounds of acquire-release.
    job.launch::<crate::kernels::lsa_sync>(&setup, 4 | 3 << 3)?;
    job.stream.synchronize()?;
    rank.barrier()?;
    let words = job.out()?;
    assert!(words.iter().all(|&wrong| wrong == 0), "{words:?}");
    Ok(())
}
