//! NCCL's host API on a simulated machine. Operations compute real results.
//!
//! Each function runs on the machine's thread, through [`call`]. A call that needs all ranks is a
//! [`Task`](rendezvous::Task): it completes on all ranks once all have called. The stream
//! operations of a call or a group form a [`batch`]: once a batch is at the head of its stream, it
//! waits for the other ranks' batches, and then the data is copied. Handles are never reused.
//!
//! # Safety
//!
//! The functions have NCCL's contracts: output pointers are valid until the call has completed (in
//! a group: until the group has; if non-blocking: until the call is no longer in progress),
//! configurations and lists are valid, strings are NUL-terminated.

mod batch;
mod call;
mod children;
mod collective;
mod collective_calls;
mod comm;
mod config;
mod dev_comm;
mod group;
mod init;
mod life;
mod memory;
mod one_sided;
mod operator;
mod p2p;
mod params;
mod properties;
mod reduce;
mod rendezvous;
mod state;
mod team;
mod window;

use devcomm_sys::nccl::Functions;

pub(crate) use self::state::State;

/// NCCL's function table.
pub(crate) static NCCL: Functions = Functions {
    get_version: Some(properties::version),
    get_error_string: Some(properties::error_string),
    get_last_error: Some(life::last),
    comm_get_async_error: Some(life::async_error),
    reset_debug_init: Some(properties::reset_debug_init),
    set_encryption: Some(properties::set_encryption),
    get_unique_id: Some(init::get_unique_id),
    comm_init_rank: Some(init::init_rank),
    comm_init_rank_config: Some(init::init_rank_config),
    comm_init_rank_scalable: Some(init::init_rank_scalable),
    comm_init_all: Some(init::init_all),
    comm_finalize: Some(life::finalize),
    comm_destroy: Some(life::destroy),
    comm_abort: Some(life::abort),
    comm_revoke: Some(life::revoke),
    comm_split: Some(children::split),
    comm_shrink: Some(children::shrink),
    comm_get_unique_id: Some(children::get_unique_id),
    comm_grow: Some(children::grow),
    comm_suspend: Some(life::suspend),
    comm_resume: Some(life::resume),
    comm_count: Some(properties::count),
    comm_user_rank: Some(properties::user_rank),
    comm_cu_device: Some(properties::cu_device),
    comm_mem_stats: Some(properties::mem_stats),
    comm_query_properties: Some(properties::query),
    all_reduce: Some(collective_calls::all_reduce),
    broadcast: Some(collective_calls::broadcast),
    reduce: Some(collective_calls::reduce),
    all_gather: Some(collective_calls::all_gather),
    reduce_scatter: Some(collective_calls::reduce_scatter),
    all_to_all: Some(collective_calls::all_to_all),
    gather: Some(collective_calls::gather),
    scatter: Some(collective_calls::scatter),
    bcast: Some(collective_calls::bcast),
    all_reduce_config: Some(collective_calls::all_reduce_config),
    broadcast_config: Some(collective_calls::broadcast_config),
    reduce_config: Some(collective_calls::reduce_config),
    all_gather_config: Some(collective_calls::all_gather_config),
    reduce_scatter_config: Some(collective_calls::reduce_scatter_config),
    all_to_all_config: Some(collective_calls::all_to_all_config),
    gather_config: Some(collective_calls::gather_config),
    scatter_config: Some(collective_calls::scatter_config),
    send: Some(p2p::send),
    recv: Some(p2p::recv),
    put_signal: Some(one_sided::put_signal),
    signal: Some(one_sided::signal),
    wait_signal: Some(one_sided::wait_signal),
    group_start: Some(group::start),
    group_end: Some(group::end),
    group_simulate_end: Some(group::simulate_end),
    mem_alloc: Some(memory::alloc),
    mem_free: Some(memory::free),
    comm_register: Some(memory::register),
    comm_deregister: Some(memory::deregister),
    comm_window_register: Some(window::register),
    comm_window_deregister: Some(window::deregister),
    win_get_user_ptr: Some(window::user_pointer),
    get_lsa_device_pointer: Some(window::lsa_pointer),
    get_peer_device_pointer: Some(window::peer_pointer),
    get_lsa_multimem_device_pointer: Some(window::lsa_multimem_pointer),
    get_multimem_device_pointer: Some(window::multimem_pointer),
    get_multimem_device_le_info: Some(window::multimem_endpoint),
    get_cft_device_le_info: Some(window::cft_endpoint),
    get_peer_device_le_info: Some(window::peer_endpoint),
    red_op_create_pre_mul_sum: Some(operator::create_pre_mul_sum),
    red_op_destroy: Some(operator::destroy),
    dev_comm_create: Some(dev_comm::create),
    dev_comm_destroy: Some(dev_comm::destroy),
    lsa_barrier_create_requirement: Some(dev_comm::lsa_barriers),
    gin_barrier_create_requirement: Some(dev_comm::gin_barriers),
    ll_a2a_calc_slots: Some(dev_comm::ll_a2a_slots),
    ll_a2a_create_requirement: Some(dev_comm::ll_a2a),
    team_world: Some(team::world),
    team_lsa: Some(team::lsa),
    team_rail: Some(team::rail),
    team_cft: Some(team::cft),
    team_cft_multimem: Some(team::cft_multimem),
    team_rank_to_world: Some(team::to_world),
    team_rank_to_lsa: Some(team::to_lsa),
    param_get_all_parameter_keys: Some(params::keys),
    param_get_parameter: Some(params::parameter),
    param_dump_all: Some(params::dump_all),
    param_bind: Some(params::bind),
    param_get_i8: Some(params::get_i8),
    param_get_i16: Some(params::get_i16),
    param_get_i32: Some(params::get_i32),
    param_get_i64: Some(params::get_i64),
    param_get_u8: Some(params::get_u8),
    param_get_u16: Some(params::get_u16),
    param_get_u32: Some(params::get_u32),
    param_get_u64: Some(params::get_u64),
    param_get_str: Some(params::get_str),
    param_get: Some(params::get),
};
