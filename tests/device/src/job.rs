//! What one rank needs to run a test kernel.

use devcomm::{
    Communicator, Counters, DevCommRequirements, DevCommResource, Error, GinBarriers,
    GinConnectionType, Kernel, LlA2a, LsaBarriers, Rank, ResourceBuffer, Signals, Stream, Window,
    WindowFlags,
};
use devcomm_device_test_kernels::{Args, Extra, Range};

use crate::KERNELS;

/// What a kernel needs: its launch, its windows, and the resources of its device communicator.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Words of the first window, which begins as zeros.
    pub mail: usize,
    /// Words of the second window, which begins as [`UNTOUCHED`](Self::UNTOUCHED).
    pub out: usize,
    /// LSA barriers.
    pub lsa_barriers: u32,
    /// LSA barriers in addition, as `Extra::lsa`.
    pub more_lsa_barriers: u32,
    /// A multicast mapping of the LSA team.
    pub multimem: bool,
    /// Bytes of a resource buffer, `Extra::buffer`.
    pub buffer: usize,
    /// Blocks, elements and bytes an element of `Extra::ll`.
    pub ll: (u32, u32, u32),
    /// Who is connected.
    pub gin: GinConnectionType,
    /// Contexts.
    pub contexts: u32,
    /// Signals, `Extra::signals`.
    pub signals: u32,
    /// Counters, `Extra::counters`.
    pub counters: u32,
    /// Barriers over the network between all ranks.
    pub world_barriers: u32,
    /// The same in addition, as `Extra::gin`.
    pub more_gin_barriers: u32,
    /// Barriers over the network between the rail's ranks.
    pub rail_barriers: u32,
    /// Hybrid barriers.
    pub hybrid_barriers: u32,
    /// Whether signals are strong unless they say otherwise.
    pub strong: bool,
    /// Signals in the first window.
    pub va: bool,
}

impl Setup {
    /// What nobody has written in the second window.
    pub const UNTOUCHED: u64 = u64::MAX;

    /// `grid` blocks of `block` threads, with an LSA barrier per block, and a word per thread to
    /// report.
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

    /// The same with GIN: all ranks connected, two signals and two counters.
    pub fn with_gin(grid: u32, block: u32) -> Self {
        let (gin, signals, counters) = (GinConnectionType::Full, 2, 2);
        Self { gin, signals, counters, ..Self::new(grid, block) }
    }
}

/// A kernel of `devcomm-device-test-kernels`.
pub trait TestKernel: Kernel<Args = Args> {}

impl<K: Kernel<Args = Args>> TestKernel for K {}

/// One rank's windows, device communicator, compiled kernels and stream.
pub struct Job {
    mail: Window<u64>,
    out: Window<u64>,
    dev_comm: DevCommResource,
    extra: Extra,
    stream: Stream,
}

impl Job {
    /// Makes them. All ranks do it.
    ///
    /// # Errors
    ///
    /// Any.
    pub fn new(rank: &Rank, setup: &Setup) -> Result<Self, Error> {
        rank.load(&KERNELS)?;
        let comm = rank.communicator()?;
        let (mail, out) = windows(comm, setup)?;
        let (dev_comm, extra) = dev_comm(comm, setup)?;
        Ok(Self { mail, out, dev_comm, extra, stream: rank.stream()? })
    }

    /// Launches a kernel, and does not wait for it.
    ///
    /// # Errors
    ///
    /// Those of the launch.
    pub fn launch<K: TestKernel>(&self, setup: &Setup, n: u32) -> Result<(), Error> {
        let args = (&self.dev_comm, &self.mail, &self.out, self.extra, n);
        // SAFETY: the setup names the windows and resources that the kernel needs; who uses this
        // waits for all ranks before it goes.
        unsafe { K::with_args(args).grid(setup.grid).block(setup.block).launch(&self.stream) }
    }

    /// Where kernels are launched.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The device communicator.
    pub fn dev_comm(&self) -> &DevCommResource {
        &self.dev_comm
    }

    /// The second window.
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
    // Of the ranks that are connected.
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
    let made = comm.create_dev_comm(requirements)?;
    let mut extra = Extra { lsa: made.resource(lsa)?, ..Default::default() };
    if let Some(ll) = ll {
        extra.ll = made.resource(ll)?;
    }
    if let Some(buffer) = buffer {
        extra.buffer = made.resource(buffer)?;
    }
    if let Some((gin, signals, counters)) = gin {
        let (signals, counters) = (made.resource(signals)?, made.resource(counters)?);
        extra.gin = made.resource(gin)?;
        extra.signals = Range { first: signals.first, count: signals.count };
        extra.counters = Range { first: counters.first, count: counters.count };
    }
    Ok((made, extra))
}

/// Checks that kernels still run: a new device communicator's barrier brings data over.
///
/// # Errors
///
/// Any, and a panic for wrong data.
pub fn require_works(rank: &Rank) -> Result<(), Error> {
    let setup = Setup::new(2, 64);
    let job = Job::new(rank, &setup)?;
    rank.barrier()?;
    job.launch::<crate::kernels::lsa_sync>(&setup, 4 | 3 << 3)?;
    job.stream.synchronize()?;
    rank.barrier()?;
    let words = job.out()?;
    assert!(words.iter().all(|&wrong| wrong == 0), "{words:?}");
    Ok(())
}
