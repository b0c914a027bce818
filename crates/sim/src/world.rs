//! The simulated devices: the simulator, its windows and buffers.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::rc::{Rc, Weak};

use devcomm_types::kernel::IntoArg;
use devcomm_types::nccl;
use devcomm_types::{Element, Slice, Window as WindowParam};

use crate::builder::Builder;
use crate::dev_comm::{CommState, DevComm, DevCommConfig};
use crate::error::{Error, Result};
use crate::gpus::{Gpus, Settings};
use crate::memory::{Allocation, Memory, Owner};
use crate::ranks::{Ranks, Symmetric};

/// Simulated GPUs, one a rank, and what they share.
///
/// It lives on one OS thread; several may live on several.
pub struct Simulator {
    pub(crate) gpus: Rc<Gpus>,
    pub(crate) world: Ranks,
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
    pub(crate) fn with(settings: Settings, lsa_ranks: usize) -> Self {
        let memory = Rc::new(Memory::new());
        let gpus = Gpus::new(settings, Rc::clone(&memory));
        let network = Rc::clone(&gpus.network);
        let world = Ranks { gpus: (0..settings.gpus as u32).collect(), lsa_ranks, memory, network };
        let (comms, ids, printed) = (RefCell::default(), Cell::new(0), RefCell::default());
        Self { gpus, world, comms, ids, printed }
    }

    /// How many ranks.
    pub fn ranks(&self) -> usize {
        self.world.len()
    }

    /// What the last launch printed, also if it failed.
    pub fn printed(&self) -> String {
        self.printed.borrow().clone()
    }

    fn next_id(&self) -> u32 {
        self.ids.replace(self.ids.get() + 1)
    }

    pub(crate) fn check_rank(&self, rank: usize) -> Result<()> {
        let ranks = self.ranks();
        if rank < ranks { Ok(()) } else { Err(Error::Rank { rank, ranks }) }
    }

    /// A symmetric window: `len` elements in every rank. As on a GPU they are undefined at first (NaN, in floats).
    ///
    /// # Errors
    ///
    /// [`Error::Memory`] where the machine has no room.
    pub fn window<T: Element>(&self, len: usize) -> Result<Window<T>> {
        let id = self.next_id();
        let bytes = len.saturating_mul(size_of::<T>());
        let memory = self.world.symmetric(bytes, id, |rank| Owner::Window { id, rank })?;
        (0..self.ranks()).for_each(|rank| memory.allocation.poison(rank));
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
        let (gpu, owner) = ([rank as u32].into_iter().collect(), Owner::Buffer { id, rank });
        let memory = Allocation::single(&self.world.memory, gpu, bytes, owner)?;
        memory.poison(0);
        Ok(Buffer { memory, len, id, rank, element: PhantomData })
    }

    /// A device communicator in every rank, with the resources of `config`.
    ///
    /// NCCL: `ncclDevCommCreate`.
    ///
    /// # Errors
    ///
    /// [`Error::Memory`] where the machine has no room, [`Error::Settings`] for what makes no sense.
    #[doc(alias = "ncclDevCommCreate")]
    pub fn dev_comm(&self, config: DevCommConfig) -> Result<DevComm> {
        let comm = DevComm::new(&self.world, &config, self.next_id())?;
        let mut known = self.comms.borrow_mut();
        known.retain(|comm| comm.strong_count() > 0);
        known.push(Rc::downgrade(comm.state()));
        Ok(comm)
    }

    /// The state of a device communicator that is an argument.
    pub(crate) fn find_comm(&self, comm: &nccl::DevComm) -> Option<Rc<CommState>> {
        let comms = self.comms.borrow();
        let mut live = comms.iter().filter_map(Weak::upgrade);
        live.find(|state| state.has(comm))
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

impl<T: Element> IntoArg<Slice<T>> for &Buffer<T> {
    fn into_arg(self) -> Slice<T> {
        Slice::new(self.address(), self.len)
    }
}
