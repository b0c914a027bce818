//! NCCL's host ABI: its structs, constants and functions, as `nccl.h` and `nccl_device/host.h` of
//! 2.32.3 declare them. To widen it, add a line to the table at the end.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{offset_of, size_of};

use devcomm_types::DevComm;

/// First word of every versioned struct. NCCL: `NCCL_API_MAGIC`.
pub(crate) const API_MAGIC: u32 = 0xcafe_beef;
/// The version whose structs these are. NCCL: `NCCL_VERSION_CODE`.
pub(crate) const ABI_VERSION: u32 = 23203;
/// "Not set". NCCL: `NCCL_CONFIG_UNDEF_INT`.
pub(crate) const UNDEF_INT: c_int = c_int::MIN;
/// Every rank uses one offset in its window. NCCL: `NCCL_WIN_COLL_SYMMETRIC`.
pub(crate) const WIN_COLL_SYMMETRIC: c_int = 1;
/// NCCL: `ncclSuccess`.
pub(crate) const SUCCESS: c_int = 0;

/// NCCL: `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawUniqueId(pub [u8; 128]);

/// NCCL: `ncclCommProperties_t`. The bools that NCCL writes are read as bytes, so that no value of
/// theirs can be invalid.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CommProperties {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub rank: c_int,
    pub n_ranks: c_int,
    pub cuda_dev: c_int,
    pub nvml_dev: c_int,
    pub device_api_support: u8,
    pub multimem_support: u8,
    pub gin_type: c_int,
    pub n_lsa_teams: c_int,
    pub host_rma_support: u8,
    pub railed_gin_type: c_int,
    pub comm_hash: u64,
    pub gin_min_stride: c_int,
    pub gin_connection_type: c_int,
    pub gin_support: [u8; 64],
    pub dev_comm_runtime_version_size: usize,
    pub cft_support: u8,
    pub cft_multicast_support: u8,
    pub cft_counted_support: u8,
}

impl CommProperties {
    /// NCCL: `NCCL_COMM_PROPERTIES_INITIALIZER`.
    pub(crate) const fn new() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: API_MAGIC,
            version: ABI_VERSION,
            rank: 0,
            n_ranks: 0,
            cuda_dev: 0,
            nvml_dev: 0,
            device_api_support: 0,
            multimem_support: 0,
            gin_type: 0,
            n_lsa_teams: 0,
            host_rma_support: 0,
            railed_gin_type: 0,
            comm_hash: 0,
            gin_min_stride: 0,
            gin_connection_type: 0,
            gin_support: [0; 64],
            dev_comm_runtime_version_size: 0,
            cft_support: 0,
            cft_multicast_support: 0,
            cft_counted_support: 0,
        }
    }
}

/// NCCL: `ncclDevCommRequirements_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requirements {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    /// NCCL: `ncclDevResourceRequirements_t*`.
    pub resource_requirements_list: *mut c_void,
    /// NCCL: `ncclTeamRequirements_t*`.
    pub team_requirements_list: *mut c_void,
    pub lsa_multimem: bool,
    pub barrier_count: c_int,
    pub lsa_barrier_count: c_int,
    pub rail_gin_barrier_count: c_int,
    pub lsa_ll_a2a_block_count: c_int,
    pub lsa_ll_a2a_slot_count: c_int,
    pub gin_force_enable: bool,
    pub gin_context_count: c_int,
    pub gin_signal_count: c_int,
    pub gin_counter_count: c_int,
    pub gin_connection_type: c_int,
    pub gin_exclusive_contexts: bool,
    pub gin_queue_depth: c_int,
    pub gin_traffic_class: c_int,
    pub world_gin_barrier_count: c_int,
    pub gin_strong_signals_required: bool,
    pub gin_va_signals_required: bool,
    pub gin_custom_stride: c_int,
    pub gin_type: c_int,
    pub use_runtime_version: bool,
    pub cft_caps: c_int,
    pub cft_barrier_count: c_int,
}

impl Requirements {
    /// NCCL: `NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER`.
    pub(crate) const fn new() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: API_MAGIC,
            version: ABI_VERSION,
            resource_requirements_list: std::ptr::null_mut(),
            team_requirements_list: std::ptr::null_mut(),
            lsa_multimem: false,
            barrier_count: 0,
            lsa_barrier_count: 0,
            rail_gin_barrier_count: 0,
            lsa_ll_a2a_block_count: 0,
            lsa_ll_a2a_slot_count: 0,
            gin_force_enable: false,
            gin_context_count: 4,
            gin_signal_count: 0,
            gin_counter_count: 0,
            gin_connection_type: 0,
            gin_exclusive_contexts: false,
            gin_queue_depth: 0,
            gin_traffic_class: UNDEF_INT,
            world_gin_barrier_count: 0,
            gin_strong_signals_required: true,
            gin_va_signals_required: true,
            gin_custom_stride: 1,
            gin_type: 0,
            use_runtime_version: false,
            cft_caps: 0,
            cft_barrier_count: 0,
        }
    }
}

const _: () = {
    assert!(size_of::<RawUniqueId>() == 128 && align_of::<RawUniqueId>() == 1);
    assert!(size_of::<CommProperties>() == 152);
    assert!(offset_of!(CommProperties, multimem_support) == 33);
    assert!(offset_of!(CommProperties, gin_type) == 36);
    assert!(offset_of!(CommProperties, railed_gin_type) == 48);
    assert!(offset_of!(CommProperties, comm_hash) == 56);
    assert!(offset_of!(CommProperties, gin_support) == 72);
    assert!(offset_of!(CommProperties, dev_comm_runtime_version_size) == 136);
    assert!(offset_of!(CommProperties, cft_counted_support) == 146);
    assert!(size_of::<Requirements>() == 120 && align_of::<Requirements>() == 8);
    assert!(offset_of!(Requirements, lsa_multimem) == 32);
    assert!(offset_of!(Requirements, lsa_barrier_count) == 40);
    assert!(offset_of!(Requirements, gin_force_enable) == 56);
    assert!(offset_of!(Requirements, gin_connection_type) == 72);
    assert!(offset_of!(Requirements, gin_traffic_class) == 84);
    assert!(offset_of!(Requirements, gin_va_signals_required) == 93);
    assert!(offset_of!(Requirements, gin_custom_stride) == 96);
    assert!(offset_of!(Requirements, use_runtime_version) == 104);
    assert!(offset_of!(Requirements, cft_barrier_count) == 112);
};

/// NCCL: `ncclComm_t`.
pub(crate) type RawComm = *mut c_void;
/// NCCL: `ncclWindow_t`, a device address.
pub(crate) type RawWindow = *mut c_void;
/// A CUDA stream: `cudaStream_t` and `CUstream` are one type.
pub(crate) type RawStream = *mut c_void;

/// Declares the functions of NCCL: each is looked up at its first call, and only after the
/// library's version says that it has it.
macro_rules! functions {
    ($( $name:ident = $symbol:literal since ($major:literal, $minor:literal, $patch:literal)
        ($($arg:ident: $type:ty),* $(,)?) -> $ret:ty; )*) => {
        /// One slot a function.
        #[derive(Default)]
        pub(crate) struct Slots {
            $( $name: std::sync::OnceLock<Option<unsafe extern "C" fn($($type),*) -> $ret>>, )*
        }

        impl super::nccl::Nccl {
            $(
                #[doc = concat!("NCCL: `", $symbol, "`.")]
                ///
                /// # Safety
                ///
                /// The C function's own contract.
                #[allow(clippy::too_many_arguments, reason = "they are the C function's")]
                pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> crate::Result<$ret> {
                    const NEEDS: devcomm_locate::NcclVersion =
                        devcomm_locate::NcclVersion { major: $major, minor: $minor, patch: $patch };
                    self.require($symbol, NEEDS)?;
                    let function = self.slots.$name.get_or_init(|| {
                        // SAFETY: the type is the prototype of that symbol in NCCL's headers.
                        unsafe { self.symbol($symbol) }
                    });
                    let function = function.ok_or_else(|| self.lacks($symbol, NEEDS))?;
                    // SAFETY: the caller upholds the function's contract; the library is never
                    // unloaded, so the pointer stays valid.
                    Ok(unsafe { function($($arg),*) })
                }
            )*
        }

        /// Every symbol of the table.
        #[cfg(test)]
        pub(crate) const SYMBOLS: &[&str] = &[$($symbol),*];
    };
}

functions! {
    get_error_string = "ncclGetErrorString" since (2, 3, 5) (code: c_int) -> *const c_char;
    get_last_error = "ncclGetLastError" since (2, 13, 4) (comm: RawComm) -> *const c_char;
    get_unique_id = "ncclGetUniqueId" since (2, 3, 5) (id: *mut RawUniqueId) -> c_int;
    comm_init_rank = "ncclCommInitRank" since (2, 3, 5)
        (comm: *mut RawComm, n_ranks: c_int, id: RawUniqueId, rank: c_int) -> c_int;
    comm_finalize = "ncclCommFinalize" since (2, 14, 3) (comm: RawComm) -> c_int;
    comm_destroy = "ncclCommDestroy" since (2, 3, 5) (comm: RawComm) -> c_int;
    comm_abort = "ncclCommAbort" since (2, 4, 2) (comm: RawComm) -> c_int;
    comm_get_async_error = "ncclCommGetAsyncError" since (2, 4, 2)
        (comm: RawComm, code: *mut c_int) -> c_int;
    comm_count = "ncclCommCount" since (2, 3, 5) (comm: RawComm, count: *mut c_int) -> c_int;
    comm_user_rank = "ncclCommUserRank" since (2, 3, 5) (comm: RawComm, rank: *mut c_int) -> c_int;
    comm_cu_device = "ncclCommCuDevice" since (2, 3, 5) (comm: RawComm, device: *mut c_int) -> c_int;
    comm_query_properties = "ncclCommQueryProperties" since (2, 29, 2)
        (comm: RawComm, properties: *mut CommProperties) -> c_int;
    mem_alloc = "ncclMemAlloc" since (2, 19, 1) (address: *mut *mut c_void, bytes: usize) -> c_int;
    mem_free = "ncclMemFree" since (2, 19, 1) (address: *mut c_void) -> c_int;
    comm_window_register = "ncclCommWindowRegister" since (2, 27, 3)
        (comm: RawComm, address: *mut c_void, bytes: usize, window: *mut RawWindow, flags: c_int) -> c_int;
    comm_window_deregister = "ncclCommWindowDeregister" since (2, 27, 3)
        (comm: RawComm, window: RawWindow) -> c_int;
    dev_comm_create = "ncclDevCommCreate" since (2, 32, 3)
        (comm: RawComm, requirements: *const Requirements, out: *mut DevComm) -> c_int;
    dev_comm_destroy = "ncclDevCommDestroy" since (2, 32, 3)
        (comm: RawComm, dev_comm: *const DevComm) -> c_int;
    all_reduce = "ncclAllReduce" since (2, 3, 5)
        (send: *const c_void, recv: *mut c_void, count: usize, data_type: c_int, op: c_int,
         comm: RawComm, stream: RawStream) -> c_int;
}
