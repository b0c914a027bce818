//! The simulated devices: the simulator, windows, buffers and device communicators.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::rc::{Rc, Weak};

use devcomm_types::kernel::IntoArg;
use devcomm_types::nccl::{self, LsaBarrierHandle, ResourceWindow};
use devcomm_types::{Element, Window as WindowParam};

use crate::builder::Builder;
use crate::error::{Error, Result};
use crate::memory::{Allocation, Memory, Owner};
use crate::nccl::{RESOURCE_UNIT, WindowView, barrier_words};
use crate::stack::Slab;

/// What NCCL writes into a device communicator: version 2.32.3.
const VERSION: u32 = 23203;

/// More than any grid needs.
const MAX_BARRIERS: u32 = 1 << 20;

/// The barriers' place among the resources, in units of [`RESOURCE_UNIT`]; not zero, so that forgetting it shows.
const BARRIERS_AT: u32 = 1;

/// Simulated GPUs, one a rank, and what they share.
///
/// It lives on one OS thread; several may live on several.
pub struct Simulator {
    pub(crate) settings: Builder,
    lsa_ranks: usize,
    pub(crate) memory: Rc<Memory>,
    /// Stacks, kept between launches.
    pub(crate) slab: RefCell<Option<Slab>>,
    comms: RefCell<Vec<Weak<CommState>>>,
    ids: Cell<u32>,
    pub(crate) printed: RefCell<String>,
}

impl Simulator {
    /// A simulator of `ranks` GPUs with the default settings.
    ///
    /// # Errors
    ///
    /// [`Error::Settings`] for no ranks.
    pub fn new(ranks: usize) -> Result<Self> {
        Self::builder().ranks(ranks).build()
    }

    /// Settings for a simulator.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// A simulator of checked settings.
    pub(crate) fn with(settings: Builder, lsa_ranks: usize) -> Self {
        crate::nccl::install();
        Self {
            settings,
            lsa_ranks,
            memory: Rc::new(Memory::new()),
            slab: RefCell::new(None),
            comms: RefCell::default(),
            ids: Cell::new(0),
            printed: RefCell::default(),
        }
    }

    /// How many ranks.
    pub fn ranks(&self) -> usize {
        self.settings.ranks
    }

    /// What the last launch printed, also if it failed.
    pub fn printed(&self) -> String {
        self.printed.borrow().clone()
    }

    fn next_id(&self) -> u32 {
        self.ids.replace(self.ids.get() + 1)
    }

    pub(crate) fn check_rank(&self, rank: usize) -> Result<()> {
        let ranks = self.settings.ranks;
        if rank < ranks { Ok(()) } else { Err(Error::Rank { rank, ranks }) }
    }

    fn symmetric(&self, bytes: usize, owner: impl Fn(usize) -> Owner) -> Result<Symmetric> {
        let (ranks, team) = (self.settings.ranks, self.lsa_ranks);
        let allocation = Allocation::symmetric(&self.memory, ranks, team, bytes, owner)?;
        let view = |rank: usize| {
            let lsa_rank = rank % self.lsa_ranks;
            WindowView {
                flat_base: allocation.part(rank - lsa_rank),
                stride_4g: allocation.stride_4g(),
                lsa_rank: lsa_rank as i32,
                lsa_size: self.lsa_ranks as i32,
                world_rank: rank as i32,
            }
        };
        let views = (0..self.settings.ranks).map(view).collect();
        Ok(Symmetric { allocation, views })
    }

    /// A symmetric window: `len` elements in every rank. As on a GPU they are undefined at first (NaN, in floats).
    ///
    /// # Errors
    ///
    /// [`Error::Memory`] where the machine has no room.
    pub fn window<T: Element>(&self, len: usize) -> Result<Window<T>> {
        let id = self.next_id();
        let bytes = len.saturating_mul(size_of::<T>());
        let memory = self.symmetric(bytes, |rank| Owner::Window { id, rank })?;
        (0..self.settings.ranks).for_each(|rank| memory.allocation.poison(rank));
        Ok(Window { memory, len, id, element: PhantomData })
    }

    /// A buffer of `len` elements in the memory of `rank` alone; undefined at first.
    ///
    /// # Errors
    ///
    /// [`Error::Rank`], and [`Error::Memory`] where the machine has no room.
    pub fn buffer<T: Element>(&self, rank: usize, len: usize) -> Result<Buffer<T>> {
        self.check_rank(rank)?;
        let id = self.next_id();
        let bytes = len.saturating_mul(size_of::<T>());
        let memory = Allocation::single(&self.memory, rank, bytes, Owner::Buffer { id, rank })?;
        memory.poison(0);
        Ok(Buffer { memory, len, id, rank, element: PhantomData })
    }

    /// A device communicator in every rank, with the resources of `config`.
    ///
    /// NCCL: `ncclDevCommCreate`.
    ///
    /// # Errors
    ///
    /// [`Error::Memory`] where the machine has no room, [`Error::Settings`] for what is not simulated.
    #[doc(alias = "ncclDevCommCreate")]
    pub fn dev_comm(&self, config: DevCommConfig) -> Result<DevComm> {
        if config.lsa_multimem {
            return Err(Error::Settings("multimem is not simulated".to_owned()));
        }
        if config.lsa_barriers > MAX_BARRIERS {
            let asked = config.lsa_barriers;
            return Err(Error::Settings(format!(
                "{asked} LSA barriers, of at most {MAX_BARRIERS}"
            )));
        }
        let id = self.next_id();
        let words = barrier_words(config.lsa_barriers as usize, self.lsa_ranks);
        let bytes = BARRIERS_AT as usize * RESOURCE_UNIT + words * size_of::<u32>();
        let resources = self.symmetric(bytes, |rank| Owner::Resources { id, rank })?;
        let comm = |rank: usize| {
            resources.allocation.zero(rank);
            let view = &resources.views[rank];
            nccl::DevComm {
                version: VERSION,
                rank: rank as i32,
                n_ranks: self.settings.ranks as i32,
                n_ranks_rcp32: reciprocal(self.settings.ranks),
                lsa_rank: view.lsa_rank,
                lsa_size: view.lsa_size,
                lsa_size_rcp32: reciprocal(self.lsa_ranks),
                resource_window: resources.handle(rank),
                resource_window_inlined: ResourceWindow {
                    lsa_flat_base: view.flat_base.cast(),
                    stride_4g: view.stride_4g,
                    mc_offset_4k: 0,
                },
                lsa_barrier: LsaBarrierHandle {
                    buffer: BARRIERS_AT,
                    n_barriers: config.lsa_barriers as i32,
                },
                ..nccl::DevComm::zeroed()
            }
        };
        let comms = (0..self.settings.ranks).map(comm).collect();
        let state = Rc::new(CommState { resources, comms, poisoned: Cell::new(false) });
        let mut known = self.comms.borrow_mut();
        known.retain(|comm| comm.strong_count() > 0);
        known.push(Rc::downgrade(&state));
        Ok(DevComm { state })
    }

    /// The state of a device communicator that is an argument.
    pub(crate) fn find_comm(&self, comm: &nccl::DevComm) -> Option<Rc<CommState>> {
        let comms = self.comms.borrow();
        let mut live = comms.iter().filter_map(Weak::upgrade);
        live.find(|state| state.comms.iter().any(|c| c.resource_window == comm.resource_window))
    }
}

/// 2^32 / `n`, as far as 32 bits hold it.
fn reciprocal(n: usize) -> u32 {
    u32::try_from((1_u64 << 32) / n.max(1) as u64).unwrap_or(u32::MAX)
}

/// Memory of all ranks, and each rank's view of it.
pub(crate) struct Symmetric {
    allocation: Allocation,
    /// Boxed: handles point here.
    views: Box<[WindowView]>,
}

impl Symmetric {
    fn handle(&self, rank: usize) -> *mut std::ffi::c_void {
        std::ptr::from_ref(&self.views[rank]).cast_mut().cast()
    }
}

/// A registered symmetric buffer of `T` in every rank. NCCL: `ncclWindow_t`.
#[doc(alias = "ncclWindow_t")]
pub struct Window<T> {
    memory: Symmetric,
    len: usize,
    id: u32,
    element: PhantomData<T>,
}

impl<T: Element> Window<T> {
    /// Elements in each rank.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the window has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `data` to the start of `rank`'s part.
    ///
    /// # Errors
    ///
    /// [`Error::Rank`], and [`Error::Length`] for more elements than there are.
    pub fn write(&self, rank: usize, data: &[T]) -> Result<()> {
        let ranks = self.memory.views.len();
        if rank >= ranks {
            return Err(Error::Rank { rank, ranks });
        }
        if data.len() > self.len {
            let what = format!("window {}", self.id);
            return Err(Error::Length { what, given: data.len(), len: self.len });
        }
        self.memory.allocation.write(rank, data);
        Ok(())
    }

    /// A copy of `rank`'s part.
    ///
    /// # Panics
    ///
    /// If there is no such rank, as indexing does.
    pub fn read(&self, rank: usize) -> Vec<T> {
        self.memory.allocation.read(rank, self.len)
    }

    /// The window as an argument for `rank`'s kernel.
    ///
    /// # Panics
    ///
    /// If there is no such rank, as indexing does. (In the closure of a launch that becomes an error.)
    pub fn rank(&self, rank: usize) -> WindowArg<'_, T> {
        WindowArg { handle: self.memory.handle(rank), window: PhantomData }
    }
}

/// A window as one rank's kernel takes it.
#[derive(Clone, Copy, Debug)]
pub struct WindowArg<'a, T> {
    handle: *mut std::ffi::c_void,
    window: PhantomData<&'a T>,
}

impl<T: Element> IntoArg<WindowParam<T>> for WindowArg<'_, T> {
    fn into_arg(self) -> WindowParam<T> {
        WindowParam::from_handle(self.handle)
    }
}

/// Device memory of one rank.
pub struct Buffer<T> {
    memory: Allocation,
    len: usize,
    id: u32,
    rank: usize,
    element: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies `data` to the start.
    ///
    /// # Errors
    ///
    /// [`Error::Length`] for more elements than there are.
    pub fn write(&self, data: &[T]) -> Result<()> {
        if data.len() > self.len {
            let what = format!("buffer {} of rank {}", self.id, self.rank);
            return Err(Error::Length { what, given: data.len(), len: self.len });
        }
        self.memory.write(0, data);
        Ok(())
    }

    /// A copy of the elements.
    pub fn read(&self) -> Vec<T> {
        self.memory.read(0, self.len)
    }

    /// The device address, for a pointer parameter of a kernel.
    pub fn address(&self) -> u64 {
        self.memory.part(0).expose_provenance() as u64
    }
}

impl<T: Element> IntoArg<u64> for &Buffer<T> {
    fn into_arg(self) -> u64 {
        self.address()
    }
}

/// What a device communicator is made with. NCCL: `ncclDevCommRequirements`.
#[doc(alias = "ncclDevCommRequirements")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DevCommConfig {
    /// LSA barriers: at least the blocks of the grids launched with it. NCCL: `lsaBarrierCount`.
    pub lsa_barriers: u32,
    /// Multicast addresses of the LSA team. They are not simulated: as on a GPU without them, the device communicator is
    /// refused. NCCL: `lsaMultimem`.
    pub lsa_multimem: bool,
}

/// A device communicator of every rank. NCCL: `ncclDevComm`.
#[doc(alias = "ncclDevComm")]
pub struct DevComm {
    state: Rc<CommState>,
}

impl DevComm {
    /// The device communicator as an argument for `rank`'s kernel.
    ///
    /// # Panics
    ///
    /// If there is no such rank, as indexing does. (In the closure of a launch that becomes an error.)
    pub fn rank(&self, rank: usize) -> DevCommArg<'_> {
        DevCommArg { comm: &self.state.comms[rank] }
    }
}

/// A device communicator as one rank's kernel takes it.
#[derive(Clone, Copy, Debug)]
pub struct DevCommArg<'a> {
    comm: &'a nccl::DevComm,
}

impl IntoArg<nccl::DevComm> for DevCommArg<'_> {
    fn into_arg(self) -> nccl::DevComm {
        *self.comm
    }

    fn dev_comm(&self) -> Option<&nccl::DevComm> {
        Some(self.comm)
    }
}

/// What lies behind a [`DevComm`].
pub(crate) struct CommState {
    #[expect(dead_code, reason = "owned: the communicators point into it")]
    resources: Symmetric,
    comms: Box<[nccl::DevComm]>,
    /// Whether a kernel that used it failed: its barriers stand anywhere.
    pub(crate) poisoned: Cell<bool>,
}
