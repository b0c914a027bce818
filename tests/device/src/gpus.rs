//! GPUs as a machine, ranks as threads.

use std::time::Duration;

use devcomm::{
    Communicator, Counters, DevCommRequirements, DevCommResource, Error, GinBarriers,
    GinConnectionType, Kernels, LaunchConfig, LlA2a, LsaBarriers, Rank, ResourceBuffer, Signals,
    Stream, Window, WindowFlags, World,
};
use devcomm_device_test_kernels::{Extra, Range};

use crate::KERNELS;
use crate::machine::{Machine, Setup, TestKernel};

/// What a kernel may take: one that waits in vain becomes an error that says for what.
const LIMIT: Duration = Duration::from_secs(30);

/// GPUs, ranks as threads.
pub struct Gpus {
    world: World,
    lsa_ranks: usize,
}

/// Runs `body` on `wanted` GPUs that reach each other by load and store, or skips the test where there are none that can run the
/// kernels, and prints which.
pub fn on_gpus(name: &str, wanted: usize, body: impl FnOnce(&Gpus)) {
    with_world(name, wanted, GinConnectionType::None, |world| {
        body(&Gpus { lsa_ranks: world.n_ranks(), world });
    });
}

/// The same where the GPUs have GIN with connections of this type, in LSA teams of any size.
pub fn on_gpus_with_gin(
    name: &str,
    wanted: usize,
    gin: GinConnectionType,
    body: impl FnOnce(&Gpus),
) {
    with_world(name, wanted, gin, |world| {
        let size = |rank: &Rank| Ok::<_, Error>(rank.communicator()?.properties()?.lsa_size());
        let sizes = world.run(size).unwrap_or_else(|error| panic!("{error}"));
        body(&Gpus { lsa_ranks: sizes[0], world });
    });
}

/// The same with the world itself. Prints what happened, for `cargo xtask test`.
pub fn with_world(name: &str, wanted: usize, gin: GinConnectionType, body: impl FnOnce(World)) {
    let found = World::threads(wanted).and_then(|world| {
        world.run(|rank| probe(rank, gin))?;
        Ok(world)
    });
    match found {
        Ok(world) => {
            body(world);
            println!("GPU-TEST {name}: ran");
        }
        Err(error) => println!("GPU-TEST {name}: skipped ({})", of_the_machine(error)),
    }
}

/// Does, in little, what every test rests on.
fn probe(rank: &Rank, gin: GinConnectionType) -> Result<(), Error> {
    rank.load(&KERNELS)?;
    let comm = rank.communicator()?;
    if gin == GinConnectionType::None {
        comm.require_single_lsa_team()?;
    }
    comm.create_dev_comm(DevCommRequirements::new().lsa_barriers(1).gin_connection(gin))?;
    comm.window::<u32>(1)?;
    Ok(())
}

/// The reason to skip: what is wrong with the machine, not with devcomm.
fn of_the_machine(error: Error) -> String {
    assert!(error.is_of_the_machine(), "{error}");
    error.to_string()
}

impl Machine for Gpus {
    fn ranks(&self) -> usize {
        self.world.n_ranks()
    }

    fn lsa_ranks(&self) -> usize {
        self.lsa_ranks
    }

    fn launches(&self) -> usize {
        100
    }

    fn run_each_after<P: TestKernel, K: TestKernel>(
        &self,
        prepare: P,
        kernel: K,
        setup: &Setup,
        before: &[u32],
        ns: &[u32],
    ) -> Vec<Vec<Vec<u64>>> {
        let run = |rank: &Rank| -> Result<Vec<Vec<u64>>, Error> {
            let job = Job::new(rank, setup)?;
            rank.barrier()?;
            for &n in before {
                job.launch(prepare, setup, n)?;
                job.stream.synchronize_within(LIMIT)?;
                rank.barrier()?;
            }
            let one = |&n: &u32| {
                job.launch(kernel, setup, n)?;
                job.stream.synchronize_within(LIMIT)?;
                let out = job.out()?;
                rank.barrier()?;
                Ok(out)
            };
            ns.iter().map(one).collect()
        };
        let of_ranks = self.world.run(run).unwrap_or_else(|error| panic!("{error}"));
        // By launches, then by ranks.
        (0..ns.len())
            .map(|i| of_ranks.iter().map(|launches| launches[i].clone()).collect())
            .collect()
    }
}

/// One rank's windows, device communicator, compiled kernels and stream.
pub struct Job {
    mail: Window<u64>,
    out: Window<u64>,
    dev_comm: DevCommResource,
    extra: Extra,
    compiled: Kernels,
    stream: Stream,
}

impl Job {
    /// Makes them. All ranks do it.
    ///
    /// # Errors
    ///
    /// Any.
    pub fn new(rank: &Rank, setup: &Setup) -> Result<Self, Error> {
        let comm = rank.communicator()?;
        let (mail, out) = windows(comm, setup)?;
        let (dev_comm, extra) = dev_comm(comm, setup)?;
        Ok(Self {
            mail,
            out,
            dev_comm,
            extra,
            compiled: rank.load(&KERNELS)?,
            stream: rank.stream()?,
        })
    }

    /// Launches a kernel, and does not wait for it.
    ///
    /// # Errors
    ///
    /// Those of the launch.
    pub fn launch<K: TestKernel>(&self, kernel: K, setup: &Setup, n: u32) -> Result<(), Error> {
        let args = (&self.dev_comm, &self.mail, &self.out, self.extra, n);
        let config = LaunchConfig::new(setup.grid, setup.block);
        // SAFETY: the setup names the windows and resources that the kernel needs; who uses this waits for all ranks before it goes.
        unsafe { self.compiled.launch(&self.stream, kernel, config, args) }
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
    mail.fill(0)?;
    out.fill(0xff)?;
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
    job.launch(crate::kernels::lsa_sync, &setup, 4 | 3 << 3)?;
    job.stream.synchronize()?;
    rank.barrier()?;
    let words = job.out()?;
    assert!(words.iter().all(|&wrong| wrong == 0), "{words:?}");
    Ok(())
}
