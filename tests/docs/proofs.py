"""The tests that prove each row of the tables of docs/security.md and docs/failures.md.

A row is named by the beginning of its first cell, a test by its file below tests/ and its name. The pages' other
guarantees name their tests in the text.
"""

from __future__ import annotations

from tests.docs.pages import DOCS, SECURITY

FAILURES = DOCS / "failures.md"
ACCESS, CONSOLE, CONTROL, FLEETS, GATEWAY, PROCESS = (
    f"orchestrator/{room}/test_" for room in ("access", "console", "control", "fleets", "gateway", "process")
)

CLIENTS = {
    "a process of another user of this machine, without a key": (
        f"{GATEWAY}authenticator.py::test_a_key_is_required_on_the_network_always_and_on_loopback_once_one_exists",
        "orchestrator/api/test_admin_api.py::test_without_the_token_every_route_is_401",
        "workers/serving/test_dataplane.py::test_a_wrong_token_another_epoch_or_a_distant_version_is_refused",
        f"{PROCESS}home.py::test_rays_token_is_private_and_new_with_each_up",
    ),
    "a client on the network, by default": (
        f"{ACCESS}security.py::test_every_field_of_a_gateways_settings_can_be_set",
        f"{ACCESS}security.py::test_all_other_addresses_are_the_network",
        f"{FLEETS}secured_cluster.py::test_a_job_from_outside_starts_a_fleet_on_a_cluster_with_token_and_tls",
    ),
    "a client on the network, with `--host`": (
        f"{ACCESS}security.py::test_up_listens_on_the_network_only_with_a_valid_key",
        f"{GATEWAY}authenticator.py::test_a_key_is_required_on_the_network_always_and_on_loopback_once_one_exists",
    ),
    "a script of another origin in a browser": (
        f"{GATEWAY}http.py::test_scripts_of_other_origins_are_rejected_by_default",
        f"{CONSOLE}own_pages.py::test_a_request_of_another_origin_is_refused",
        f"{CONSOLE}attacks_in_browser.py::test_a_foreign_page_changes_nothing",
    ),
    "a holder of a key of scope inference": (
        f"{GATEWAY}http.py::test_keys_are_checked_for_validity_scope_and_model",
        f"{ACCESS}security.py::test_a_key_of_scope_inference_changes_nothing_and_sees_nothing",
    ),
    "a holder of a key of scope admin who reaches the admin API": (
        f"{ACCESS}security.py::test_a_key_of_scope_admin_changes_the_fleet_until_it_is_revoked",
        f"{ACCESS}security.py::test_a_key_does_not_grant_a_shell",
        f"{ACCESS}security.py::test_a_key_may_apply_sources_beside_ups_own_spec",
    ),
    "a holder of the fleet's token (`fleet.json`)": (
        f"{FLEETS}fleet.py::test_the_admin_api_needs_the_token",
        f"{ACCESS}security.py::test_a_key_does_not_grant_a_shell",
    ),
    "a holder of Ray's token who reaches Ray's ports": (
        f"{FLEETS}secured_cluster.py::test_a_job_from_outside_starts_a_fleet_on_a_cluster_with_token_and_tls",
    ),
    "the fleet's user, root": (f"{FLEETS}fleet.py::test_the_admin_api_needs_the_token",),
}
SECRETS = {
    "`keys.json`": (f"{ACCESS}keys.py::test_no_secret_is_in_the_file_and_only_its_owner_can_read_it",),
    "`received/`": (f"{GATEWAY}gateways_on_hosts.py::test_only_its_user_can_read_what_a_gateway_has_received",),
    "`fleet.json`": (
        f"{FLEETS}fleet.py::test_the_admin_api_needs_the_token",
        f"{FLEETS}ends.py::test_a_signal_during_the_start_of_the_fleet_ends_it_and_leaves_nothing",
    ),
    "`ray-token`": (f"{PROCESS}home.py::test_rays_token_is_private_and_new_with_each_up",),
    "the files of `--tls-key`": (f"{ACCESS}tls.py::test_an_unusable_file_is_reported",),
    "`journal`": ("orchestrator/control/journal/test_journal.py::test_only_the_owner_can_read_the_file",),
}
RECOVERY = {
    "A replica is killed.": (
        f"{FLEETS}fleet.py::test_a_killed_replica_restarts_on_its_cores_without_affecting_others",
        f"{GATEWAY}gateway.py::test_a_lost_replica_ends_a_begun_stream_with_an_error_event",
        f"{GATEWAY}gateway.py::test_requests_without_output_are_retried_on_another_replica",
        f"{CONTROL}failure_reactions.py::test_requests_are_held_for_a_replica_that_comes_back_within_the_hold_time",
        f"{GATEWAY}readiness.py::test_a_model_that_should_always_have_a_replica_makes_the_gateway_unready_without_one",
    ),
    "A replica cannot start.": (
        f"{FLEETS}ends.py::test_a_replica_that_cannot_start_shows_the_reason_while_others_serve",
        f"{FLEETS}load_failures.py::test_the_pauses_double_until_the_breaker_opens",
        f"{FLEETS}load_failures.py::test_a_request_gets_503_with_the_cause",
    ),
    "A model does not compile.": (
        "orchestrator/control/test_prefetch.py::test_a_failed_compilation_is_not_repeated_before_an_operator_acts",
        "workers/compiled/test_prepare.py::test_only_a_killed_compile_is_repeated",
        "workers/host/test_neuron_faults.py::test_an_unknown_failure_of_a_compilation_stops_with_its_last_lines",
    ),
    "A [warm process]": (
        f"{FLEETS}warm_starts.py::test_without_a_warm_process_replicas_start_as_fresh_ones",
        f"{FLEETS}frozen_processes.py::test_a_frozen_warm_process_keeps_no_replica_from_its_start",
        "workers/host/test_warm_processes.py::test_a_server_ends_where_memory_is_short",
    ),
    "A replica hangs: its process is frozen,": (
        f"{FLEETS}operations.py::test_a_frozen_replica_is_noticed_and_replaced",
        f"{FLEETS}operations.py::test_a_blocked_step_is_detected_by_the_watchdog",
    ),
    "The [server]": (
        f"{FLEETS}servers.py::test_a_killed_server_loses_no_request",
        f"{FLEETS}servers.py::test_whatever_process_is_killed_the_replica_returns_and_no_request_is_lost",
        "workers/engines/test_keeper.py::test_the_death_of_the_first_process_ends_the_others",
    ),
    "The keeper of a server is stopped.": (
        "workers/engines/test_keeper.py::test_a_stopped_keeper_goes_on_and_notices_the_end_of_its_server",
        f"{FLEETS}servers.py::test_whatever_process_is_killed_the_replica_returns_and_no_request_is_lost",
    ),
    "Tokenizer processes are stopped.": (
        f"{FLEETS}frozen_processes.py::test_frozen_tokenizers_are_replaced_and_no_running_stream_stalls",
    ),
    "A host actor hangs:": (
        f"{FLEETS}frozen_processes.py::test_a_host_actor_that_hangs_is_replaced_and_a_replica_killed_meanwhile_returns",
    ),
    "The controller hangs.": (f"{FLEETS}frozen_processes.py::test_a_controller_that_hangs_is_replaced",),
    "A replica hangs while no controller runs.": (
        f"{FLEETS}operations.py::test_a_frozen_replica_of_a_dead_controller_is_ended_by_the_next",
        f"{FLEETS}frozen_processes.py::test_a_replica_that_hangs_while_its_controller_is_killed_is_replaced_on_its_cores",
    ),
    "Everything pauses at once,": (
        f"{FLEETS}pauses.py::test_a_pause_of_20_seconds_ends_nothing",
        f"{CONTROL}paused_controller.py::test_no_sequence_of_pauses_ends_a_healthy_replica",
    ),
    "One of several hosts is lost.": (
        f"{FLEETS}silent_hosts.py::test_a_silent_host_costs_only_its_own_streams",
        f"{FLEETS}operations.py::test_a_lost_host_leaves_the_remaining_room_to_the_highest_priority",
        f"{GATEWAY}gateway.py::test_a_request_at_a_silent_replica_moves_to_its_replacement",
        "workers/serving/test_cut_host.py::test_a_cut_host_is_given_up_within_seconds_and_used_again_when_it_is_back",
    ),
    "A host will end:": (
        f"{CONTROL}departures.py::test_replicas_move_all_at_once_before_their_host_ends",
        f"{CONTROL}departures.py::test_what_cannot_be_moved_serves_until_its_drain_must_begin_and_is_stopped_in_time",
    ),
    "Another process takes a core.": (
        f"{FLEETS}operations.py::test_a_core_taken_by_a_foreign_process_is_quarantined_and_the_replica_moves",
    ),
    "An update fails.": (
        f"{FLEETS}failed_updates.py::test_failing_updates_cost_no_request",
        "orchestrator/control/decisions/test_updates.py::test_requests_are_held_until_a_failed_swap_is_rolled_back",
    ),
    "The disk is full.": (
        f"{FLEETS}operations.py::test_on_a_full_disk_nothing_is_applied_but_repairs_continue",
        f"{FLEETS}machine_faults.py::test_a_full_disk_rejects_changes_and_ends_nothing",
    ),
    "The home folder or the journal is removed": (
        f"{FLEETS}frozen_processes.py::test_a_fleet_without_its_home_serves_refuses_an_apply_and_can_be_ended",
        f"{CONTROL}journal_lost.py::test_a_fleet_without_its_journal_serves_and_holds_its_actions",
    ),
    "The controller is killed.": (
        f"{FLEETS}fleet.py::test_a_killed_controller_adopts_the_replicas_and_breaks_no_stream",
    ),
    "A cleaner of temporary folders removes the sockets.": (
        f"{FLEETS}pauses.py::test_removed_sockets_cost_no_answer",
        f"{CONTROL}unreachable_replicas.py::test_an_unreachable_model_makes_the_gateway_unready",
        f"{CONTROL}unreachable_replicas.py::test_unreachable_replicas_are_in_status_events_and_metrics",
    ),
    "The gateway hangs:": (
        f"{FLEETS}pauses.py::test_a_gateway_that_hangs_is_replaced_within_seconds",
        f"{GATEWAY}gateway_watch.py::test_a_stopped_gateway_is_killed_and_replaced_by_the_spare",
        f"{GATEWAY}gateway_watch.py::test_a_gateway_that_computes_for_a_while_is_not_killed",
    ),
    "The gateway is killed.": (
        f"{FLEETS}two_gateways.py::test_a_spare_takes_the_port_at_once_regardless_of_the_files",
        f"{FLEETS}frozen_processes.py::test_all_gateways_of_a_machine_that_are_killed_together_are_back_soon",
    ),
    "A client disconnects.": (
        f"{GATEWAY}disconnects.py::test_a_disconnected_client_frees_its_slots_within_two_steps",
        f"{GATEWAY}client_errors.py::test_a_disconnected_client_frees_its_resources",
    ),
    "Ray's node process": (
        f"{FLEETS}pauses.py::test_a_raylet_that_stalls_for_20_seconds_has_no_effect",
        f"{FLEETS}pauses.py::test_a_raylet_that_dies_ends_the_fleet_with_a_report_and_leaves_nothing",
    ),
    "`corewright up` gets SIGTERM,": (
        f"{FLEETS}fleet.py::test_down_drains_a_running_stream_and_leaves_nothing",
        f"{FLEETS}ends.py::test_a_second_signal_ends_at_once",
    ),
    "`corewright up` is killed with SIGKILL.": (
        f"{FLEETS}ends.py::test_after_kill_9_of_the_daemon_the_next_up_removes_the_leftovers",
    ),
}
NOTICES = {
    "interruption of a spot instance": (
        "workers/host/test_instance_metadata.py::test_an_interruption_has_a_deadline_and_a_recommendation_has_none",
        f"{CONTROL}departures.py::test_replicas_move_all_at_once_before_their_host_ends",
    ),
    "recommendation to rebalance": (
        "workers/host/test_instance_metadata.py::test_an_interruption_has_a_deadline_and_a_recommendation_has_none",
        f"{CONTROL}departures.py::test_a_notice_without_a_deadline_moves_replicas_one_by_one",
    ),
    "a Ray node that is drained:": (f"{FLEETS}joined_cluster.py::test_fleets_live_on_a_cluster_until_down",),
    "an operator, by": (
        f"{CONTROL}departures.py::test_an_operators_deadline_empties_a_host_that_has_no_other",
        "orchestrator/cli/test_hosts.py::test_drain_waits_until_the_host_is_empty",
    ),
}

# By page and heading of the table's section.
PROOFS = {
    (SECURITY, "Who can do what"): CLIENTS,
    (SECURITY, "Secrets on disk"): SECRETS,
    (FAILURES, "Failures and recovery"): RECOVERY,
    (FAILURES, "Hosts that end"): NOTICES,
}
