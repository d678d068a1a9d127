/* Prefill on one device, decode on another: an engine with a reader, a second engine of the same model that reads prompts for it.
 *
 *   submit (front thread)   engine_handover_create: memory for the hand-over, and the prompt's whole pages as a request of the reader
 *   add_request (loop)      engine_handover_begin: alps_split decides; the request is then away, in no queue here
 *   reader's thread         admitted: asks for pages here. A chunk is read: its whole pages are sent into them, while the next one is
 *                           read. All read and arrived: the hand-over is over
 *   engine_placement_turn   answers who asks (what this side has cached is not sent again); takes back what is over: its pages become
 *                           cached pages of this side, the request joins the queue, and admission finds them (loop)
 *   admit                   the prompt's tail, at most a page, is read here, and the first token is drawn here
 *
 * So every draw, fork and log probability is the decode side's, and a page that is lost, refused or evicted on the way is read here again:
 * answers do not depend on the placement. Rules: 1. A hand-over outlives its request: a slot whose pages are written from outside is closed
 * only when the reader has let go of it. 2. The decode side never waits for the reader; the reader waits for an answer, at most one step of
 * the decode side, when a prompt is complete. 3. A reader that has failed fails the engine: all requests end with SITS_DEVICE.
 * Threads: [loop] the decode side's engine thread, [reader] the reader's; what they share is under the inbox mutex of the decode side.
 * Both have threads of their own, so an engine with a reader is started, not stepped. */
#ifndef SITS_ENGINE_ENGINE_PLACEMENT_H
#define SITS_ENGINE_ENGINE_PLACEMENT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine_core.h"

struct sits_request;
struct engine_handover;
struct engine_placement;

/* options->reader is not NULL. SITS_UNSUPPORTED where the backend cannot send pages. */
enum sits_status engine_placement_create(struct sits_engine *engine, const struct engine_options *options, struct engine_placement **out,
                                         struct sits_error *err) SITS_MUST_CHECK;
enum sits_status engine_placement_start(struct engine_placement *placement, struct sits_error *err) SITS_MUST_CHECK;
/* After the engine's thread has ended. NULL is fine. */
void engine_placement_destroy(struct engine_placement *placement);

/* Submitting thread: SITS_OK with request->handover NULL where the prompt would not be handed over in any case. */
enum sits_status engine_handover_create(struct sits_engine *engine, struct sits_request *request) SITS_MUST_CHECK;
void engine_handover_destroy(struct sits_request *request); /* never begun; none is fine */

/* [loop] True: the request is away. False: it is read here. */
bool engine_handover_begin(struct sits_engine *engine, struct sits_request *request);
void engine_handover_abandon(struct sits_request *request); /* [loop] it has ended; none is fine */
void engine_placement_turn(struct sits_engine *engine);     /* [loop] */
bool engine_placement_is_busy(const struct engine_placement *placement);  /* [loop] something is away; NULL is fine */
bool engine_placement_has_mail(const struct engine_placement *placement); /* under the inbox mutex; NULL is fine */
int64_t engine_placement_heartbeat_us(const struct engine_placement *placement); /* the reader's; INT64_MAX for NULL */
void engine_placement_stats(const struct engine_placement *placement, struct engine_stats *out); /* [loop] NULL is fine */

#endif
