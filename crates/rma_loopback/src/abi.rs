//! NCCL's RMA plugin interface, versions 14 to 16 (NCCL 2.31 and 2.32), with asserted layouts.
//!
//! Fields have NCCL's names in snake case. Every function returns a [`Status`].

use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::mem::{offset_of, size_of};

/// Return code. NCCL: `ncclResult_t`.
pub type Status = c_int;
/// An opaque pointer: a communicator, context, region or request of the plugin.
pub type Opaque = *mut c_void;
/// NCCL's variadic logger. NCCL: `ncclDebugLogger_t`.
pub type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);

/// Success.
pub const SUCCESS: Status = 0;
/// A call of the CUDA driver failed.
pub const UNHANDLED_CUDA_ERROR: Status = 1;
/// A call of the operating system failed.
pub const SYSTEM_ERROR: Status = 2;
/// A bug in the plugin, or invalid counts in memory that another process shares.
pub const INTERNAL_ERROR: Status = 3;
/// An argument is out of range.
pub const INVALID_ARGUMENT: Status = 4;
/// The plugin does not support this configuration.
pub const INVALID_USAGE: Status = 5;
/// Another rank ended or failed.
pub const REMOTE_ERROR: Status = 6;
/// Other ranks did not connect in time.
pub const TIMEOUT: Status = 8;

/// A region of host memory.
pub const PTR_HOST: c_int = 1;
/// A region of device memory.
pub const PTR_CUDA: c_int = 2;
/// The plugin accepts DMA-BUF registrations.
pub const PTR_DMABUF: c_int = 4;
/// Bytes of the handle that `listen` fills.
pub const HANDLE_BYTES: usize = 128;
/// Maximum outstanding requests per context and peer, to be multiplied by `max_recvs`.
pub const MAX_REQUESTS: usize = 32;
/// Flag of a region: only the plugin writes its words.
pub const MR_SIGNAL_NEVER_RESET: u64 = 1 << 1;
/// Signal operation: add 1, ignoring the value.
pub const SIGNAL_INC: u32 = 1;
/// Signal operation: add the value.
pub const SIGNAL_ADD: u32 = 2;
/// The type of a network device through which GIN PROXY works. NCCL: `NCCL_NET_DEVICE_GIN_PROXY`.
pub const NET_DEVICE_GIN_PROXY: c_int = 2;

/// The physical devices behind a device. NCCL: `ncclNetVDeviceProps_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NetVDeviceProps {
    /// The number of physical devices.
    pub ndevs: c_int,
    /// The indices of these: the first `ndevs` of the array.
    pub devs: [c_int; 8],
}

/// A device of the plugin. NCCL: `ncclNetProperties_v12_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "NCCL's names")]
pub struct NetProperties {
    pub name: *const c_char,
    pub pci_path: *const c_char,
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: c_int,
    pub force_flush: c_int,
    pub speed: c_int,
    pub port: c_int,
    pub latency: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
    pub v_props: NetVDeviceProps,
    pub max_p2p_bytes: usize,
    pub max_coll_bytes: usize,
    pub max_multi_request_size: c_int,
    pub rail_id: i16,
    pub plane_id: i16,
}

/// Configuration of a context. NCCL: `ncclRmaConfig_v16_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "NCCL's names")]
pub struct RmaConfig {
    pub n_contexts: c_int,
    pub traffic_class: c_int,
    pub rank_stride: c_int,
}

/// Guarantees of the plugin that the interface does not require. NCCL: `ncclRmaProperties_v16_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaProperties {
    /// A signal covers earlier puts of every context to every peer.
    pub flushes_all_puts_on_any_signal: bool,
}

/// `init(ctx, comm_id, logger)`.
pub type Init = unsafe extern "C" fn(*mut Opaque, u64, Option<Logger>) -> Status;
/// `devices(count)`.
pub type Devices = unsafe extern "C" fn(*mut c_int) -> Status;
/// `get_rma_properties(comm, properties)`.
pub type GetRmaProperties = unsafe extern "C" fn(Opaque, *mut RmaProperties) -> Status;
/// `get_properties(device, properties)`.
pub type GetProperties = unsafe extern "C" fn(c_int, *mut NetProperties) -> Status;
/// `listen(ctx, device, handle, listen_comm)`.
pub type Listen = unsafe extern "C" fn(Opaque, c_int, Opaque, *mut Opaque) -> Status;
/// `connect(ctx, handles, n_ranks, rank, listen_comm, comm)`.
pub type Connect =
    unsafe extern "C" fn(Opaque, *mut Opaque, c_int, c_int, Opaque, *mut Opaque) -> Status;
/// `create_context(comm, config, rma_ctx)`.
pub type CreateContext = unsafe extern "C" fn(Opaque, *mut RmaConfig, *mut Opaque) -> Status;
/// `reg_mr_sym(comm, data, bytes, memory, flags, region)`.
pub type RegMrSym = unsafe extern "C" fn(Opaque, Opaque, usize, c_int, u64, *mut Opaque) -> Status;
/// `reg_mr_sym_dma_buf(comm, data, bytes, memory, offset, fd, flags, region)`.
pub type RegMrSymDmaBuf =
    unsafe extern "C" fn(Opaque, Opaque, usize, c_int, u64, c_int, u64, *mut Opaque) -> Status;
/// `dereg_mr_sym(comm, region)`.
pub type DeregMrSym = unsafe extern "C" fn(Opaque, Opaque) -> Status;
/// A function of one object: `destroy_context`, `close_coll`, `close_listen`, `rma_progress` or
/// `finalize`.
pub type ObjectFunction = unsafe extern "C" fn(Opaque) -> Status;
/// Declares the types of an operation: with `opt_flags`, and without them as before version 15.
macro_rules! operation {
    ($(#[$doc:meta])* $name:ident, $(#[$doc_v14:meta])* $name_v14:ident($($arg:ty),*)) => {
        $(#[$doc])*
        pub type $name = unsafe extern "C" fn(Opaque, $($arg,)* u32, *mut Opaque) -> Status;
        $(#[$doc_v14])*
        pub type $name_v14 = unsafe extern "C" fn(Opaque, $($arg,)* *mut Opaque) -> Status;
    };
}

operation! {
    /// `iput(rma_ctx, context, src_off, src, bytes, dst_off, dst, rank, opt_flags, request)`.
    Iput,
    /// [`Iput`] before version 15, without `opt_flags`; `iget` has these types, remote side first.
    IputV14(c_int, u64, Opaque, usize, u64, Opaque, u32)
}

operation! {
    /// `iput_signal(rma_ctx, context, src_off, src, bytes, dst_off, dst, rank, signal_off, signal,
    /// value, op, strong, opt_flags, request)`.
    IputSignal,
    /// [`IputSignal`] before version 15, without `opt_flags`.
    IputSignalV14(c_int, u64, Opaque, usize, u64, Opaque, u32, u64, Opaque, u64, u32, bool)
}

/// `iflush(rma_ctx, context, region, rank, request)`.
pub type Iflush = unsafe extern "C" fn(Opaque, c_int, Opaque, u32, *mut Opaque) -> Status;
/// `test(comm, request, done)`.
pub type Test = unsafe extern "C" fn(Opaque, Opaque, *mut c_int) -> Status;
/// `query_last_error(rma_ctx, has_error)`.
pub type QueryLastError = unsafe extern "C" fn(Opaque, *mut bool) -> Status;

/// Declares a function table: fields in order, with their offsets.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident,
    $bytes:literal { $($offset:literal $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        #[allow(missing_docs, reason = "NCCL's names")]
        pub struct $name {
            $(pub $field: $type,)*
        }

        // SAFETY: the table is constant: a pointer to a static C string, and functions.
        unsafe impl Sync for $name {}

        const _: () = {
            $(assert!(offset_of!($name, $field) == $offset);)*
            assert!(size_of::<$name>() == $bytes);
        };
    };
}

table! {
    /// NCCL: `ncclRma_v16_t`.
    RmaV16, 176 {
        0 name: *const c_char,
        8 init: Init,
        16 devices: Devices,
        24 get_rma_properties: GetRmaProperties,
        32 get_properties: GetProperties,
        40 listen: Listen,
        48 connect: Connect,
        56 create_context: CreateContext,
        64 reg_mr_sym: RegMrSym,
        72 reg_mr_sym_dma_buf: RegMrSymDmaBuf,
        80 dereg_mr_sym: DeregMrSym,
        88 destroy_context: ObjectFunction,
        96 close_coll: ObjectFunction,
        104 close_listen: ObjectFunction,
        112 iput: Iput,
        120 iput_signal: IputSignal,
        128 iget: Iput,
        136 iflush: Iflush,
        144 test: Test,
        152 rma_progress: ObjectFunction,
        160 query_last_error: QueryLastError,
        168 finalize: ObjectFunction,
    }
}

/// Declares a table of version 14 or 15, which differ in the types of puts and gets.
macro_rules! table_before_v16 {
    ($(#[$doc:meta])* $name:ident, $iput:ty, $iput_signal:ty) => {
        table! {
            $(#[$doc])*
            $name, 168 {
                0 name: *const c_char,
                8 init: Init,
                16 devices: Devices,
                24 get_properties: GetProperties,
                32 listen: Listen,
                40 connect: Connect,
                48 create_context: CreateContext,
                56 reg_mr_sym: RegMrSym,
                64 reg_mr_sym_dma_buf: RegMrSymDmaBuf,
                72 dereg_mr_sym: DeregMrSym,
                80 destroy_context: ObjectFunction,
                88 close_coll: ObjectFunction,
                96 close_listen: ObjectFunction,
                104 iput: $iput,
                112 iput_signal: $iput_signal,
                120 iget: $iput,
                128 iflush: Iflush,
                136 test: Test,
                144 rma_progress: ObjectFunction,
                152 query_last_error: QueryLastError,
                160 finalize: ObjectFunction,
            }
        }
    };
}

table_before_v16! {
    /// NCCL: `ncclRma_v15_t`.
    RmaV15, Iput, IputSignal
}

table_before_v16! {
    /// NCCL: `ncclRma_v14_t`.
    RmaV14, IputV14, IputSignalV14
}

const _: () = {
    assert!(offset_of!(NetProperties, guid) == 16);
    assert!(offset_of!(NetProperties, ptr_support) == 24);
    assert!(offset_of!(NetProperties, speed) == 36);
    assert!(offset_of!(NetProperties, latency) == 44);
    assert!(offset_of!(NetProperties, max_recvs) == 52);
    assert!(offset_of!(NetProperties, net_device_type) == 56);
    assert!(offset_of!(NetProperties, v_props) == 64);
    assert!(offset_of!(NetProperties, max_p2p_bytes) == 104);
    assert!(offset_of!(NetProperties, max_multi_request_size) == 120);
    assert!(offset_of!(NetProperties, rail_id) == 124);
    assert!(offset_of!(NetProperties, plane_id) == 126);
    assert!(size_of::<NetProperties>() == 128);
    assert!(size_of::<RmaConfig>() == 12 && offset_of!(RmaConfig, rank_stride) == 8);
    assert!(size_of::<RmaProperties>() == 1);
};
